"""Models that run through transformers' modules give the outputs of transformers in every mode of the engine.

Normal runs test two checkpoints: one whose family may have no native class, with full-attention layers between
sliding-window layers, and one with soft caps and a different embedding.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mvllm import LLM
from tests.helpers import parity
from tests.helpers.parity import BLOCK_SIZE, Oracle

zoo = importlib.import_module("plugins.transformers-backend.tests.text_zoo")
WHICH = (0, 1, 3, 4, 6, 9, 11, 12)
"""Prompts by their index in PROMPT_LENGTHS; five of them share prefixes."""
NUM_TOKENS = 40
EVERY_DAY = ("cohere2", "gemma2")
NAMES = [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.exhaustive) for name in zoo.ZOO]


def generate(llm: LLM, prompts: list[list[int]], **settings: object) -> list:
    return parity.generate(llm, prompts, max_tokens=NUM_TOKENS, **settings)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(name: str, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = zoo.make_checkpoint(name, tmp_path_factory.mktemp("fallback"))
    return parity.oracle_of(folder, parity.prompts_of(name, WHICH), NUM_TOKENS)


@pytest.fixture(scope="module")
def llm(expected: Oracle) -> Iterator[LLM]:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 11}
    with parity.engine(expected.folder, model_impl="transformers", skip_tokenizer_init=True, **settings) as llm:
        yield llm


@pytest.mark.shows("tokens", impl="transformers")
def test_alone_in_chunks_in_a_batch_and_after_prefix_hits(expected: Oracle, llm: LLM) -> None:
    for i in (0, 6):
        parity.check(expected, generate(llm, [expected.prompts[i]]), [i])
    assert llm.reset_prefix_cache()
    outputs = generate(llm, expected.prompts, prompt_logprobs=1)
    parity.check(expected, outputs)
    parity.check_prompt_logprobs(expected, outputs)

    again = generate(llm, expected.prompts)
    parity.check(expected, again)
    for output, prompt in zip(again, expected.prompts, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.shows("tokens", impl="transformers")
def test_preempted_and_recomputed(expected: Oracle) -> None:
    settings: dict[str, object] = {"model_impl": "transformers", "skip_tokenizer_init": True}
    with parity.engine(expected.folder, **settings) as llm:
        summary = llm.llm_engine.cache_summary
        enough_for_one = parity.bytes_of_blocks(llm, summary.blocks_per_request * 4 // 3)
    with parity.engine(expected.folder, kv_cache_memory_bytes=enough_for_one, **settings) as llm:
        parity.check(expected, generate(llm, expected.prompts))
        stats = llm.llm_engine.stats
        # A request whose layers all have a window may never need more blocks than its first allocation.
        assert stats is not None and (stats.num_preemptions > 0 or None not in summary.windows)


@pytest.mark.exhaustive
@pytest.mark.shows("tp", impl="transformers")
@pytest.mark.parametrize("name", ["cohere2", "gpt_neox"])
def test_processes_that_share_it_give_the_same(name: str, tmp_path: Path) -> None:
    folder = zoo.make_checkpoint(name, tmp_path)
    expected = parity.oracle_of(folder, parity.prompts_of(name, WHICH), NUM_TOKENS)
    with parity.engine(folder, model_impl="transformers", skip_tokenizer_init=True, tensor_parallel_size=2) as llm:
        parity.check(expected, generate(llm, expected.prompts))
