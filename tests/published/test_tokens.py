"""Tokens of the published models are those of transformers, which reads the same files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mvllm import LoRARequest, SamplingParams
from mvllm.config.hub import find_model
from mvllm.engine.tokenizer.tokenizer import load_tokenizer
from tests.helpers import parity
from tests.helpers.lora_adapters import check_against, merged, write_adapter
from tests.helpers.published import PACKAGES
from tests.published.conftest import SIZES, Published
from tests.published.texts import HARD, PASSAGE
from tests.unit.engine.builders import make_config

NUM_TOKENS = 24
CHUNK = 32
PROMPTS = (
    "The capital of France is",
    PASSAGE[:600],  # several chunks, and several blocks shared with the next one
    PASSAGE[:500],
    "def fibonacci(n):\n    ",
    HARD,
)


def _converted(model: Published, folder: Path) -> Path:
    """The file as transformers reads it: a checkpoint in float32."""
    paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, str(Path(__file__).with_name("convert.py")), str(model.path), str(folder)]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True
    )
    if "accelerate is required" in ran.stderr:
        pytest.skip("transformers needs accelerate: `python3 ci/dev.py test --published` fetches it")
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def oracle(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Iterator[parity.Oracle]:
    folder = tmp_path_factory.mktemp("converted") / published.name
    tokenizer = load_tokenizer(make_config(tokenizer=str(find_model(str(published.path)))).model)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    yield parity.oracle_of(_converted(published, folder), prompts, NUM_TOKENS)
    shutil.rmtree(folder)  # up to 1.1 GB


def test_greedy_tokens_are_those_of_transformers(published: Published, oracle: parity.Oracle) -> None:
    """In one batch, with prompts cut in chunks, and again with their prefixes in the cache."""
    assert len(oracle.prompts[1]) > 3 * CHUNK
    with parity.engine(published.path, **SIZES, max_num_batched_tokens=CHUNK) as llm:
        parity.check(oracle, parity.generate(llm, oracle.prompts, max_tokens=NUM_TOKENS))
        again = parity.generate(llm, oracle.prompts, max_tokens=NUM_TOKENS)
        parity.check(oracle, again)
        cached = [output.num_cached_tokens or 0 for output in again]
        assert cached[1] > 2 * CHUNK and cached[2] > 2 * CHUNK


@pytest.mark.parametrize("published", ["smollm2"], indirect=True)
def test_a_draft_model_changes_no_token(published: Published, oracle: parity.Oracle) -> None:
    """The model drafts for itself, and nearly all drafts are right: those of the last step exceed max_tokens."""
    speculative: dict[str, Any] = {"model": str(published.path), "num_speculative_tokens": 4}
    with parity.engine(published.path, **SIZES, speculative_config=speculative) as llm:
        parity.check(oracle, parity.generate(llm, oracle.prompts, max_tokens=NUM_TOKENS))
        stats = llm.llm_engine.stats
        assert stats is not None and stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens > 0


@pytest.mark.parametrize("published", ["smollm2"], indirect=True)
def test_an_adapter_has_the_effect_of_merged_weights(
    published: Published, oracle: parity.Oracle, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", oracle.folder, size=0.05)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in oracle.prompts[:3]]
    request = LoRARequest("one", 1, str(adapter))
    with parity.engine(published.path, **SIZES, enable_lora=True) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=request)
        parity.check(oracle, parity.generate(llm, oracle.prompts, max_tokens=NUM_TOKENS))
    check_against(merged(oracle.folder, adapter), outputs)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert all(tokens != expected for tokens, expected in zip(found, oracle.tokens, strict=False))
