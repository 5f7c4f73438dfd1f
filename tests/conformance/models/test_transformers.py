"""Models through transformers' modules give what transformers gives, whatever the engine does with a prompt.

Two checkpoints stand for all in the everyday run: one whose family may have no class here, with layers that see
everything between layers with windows, and one with soft caps and embeddings of its own kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mvllm import LLM
from tests.helpers import parity
from tests.helpers.fallback_zoo import FALLBACK_ZOO, make_fallback_checkpoint
from tests.helpers.parity import BLOCK_SIZE, Oracle

WHICH = (0, 3, 6, 9, 10, 11, 12, 15)
"""Prompts by their place in PROMPT_LENGTHS; six of them begin alike."""
NUM_TOKENS = 24
EVERY_DAY = ("cohere2", "gemma2")
NAMES = [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.exhaustive) for name in FALLBACK_ZOO]


def generate(llm: LLM, prompts: list[list[int]], **settings: object) -> list:
    return parity.generate(llm, prompts, max_tokens=NUM_TOKENS, **settings)


@pytest.fixture(scope="module", params=NAMES)
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = make_fallback_checkpoint(request.param, tmp_path_factory.mktemp("fallback"))
    return parity.oracle_of(folder, parity.prompts_of(request.param, WHICH), NUM_TOKENS)


@pytest.fixture(scope="module")
def llm(expected: Oracle) -> Iterator[LLM]:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 11}
    with parity.engine(expected.folder, model_impl="transformers", skip_tokenizer_init=True, **settings) as llm:
        yield llm


def test_alone_in_chunks_in_a_batch_and_after_prefix_hits(expected: Oracle, llm: LLM) -> None:
    for i in (0, 4):
        parity.check(expected, generate(llm, [expected.prompts[i]]), [i])
    assert llm.reset_prefix_cache()
    outputs = generate(llm, expected.prompts, prompt_logprobs=1)
    parity.check(expected, outputs)
    parity.check_prompt_logprobs(expected, outputs)

    again = generate(llm, expected.prompts)
    parity.check(expected, again)
    for output, prompt in zip(again, expected.prompts, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_preempted_and_recomputed(expected: Oracle, llm: LLM) -> None:
    settings = {"kv_cache_memory_bytes": parity.bytes_of_blocks(llm, 16), "skip_tokenizer_init": True}
    with parity.engine(expected.folder, model_impl="transformers", **settings) as small:
        parity.check(expected, generate(small, expected.prompts))
        stats = small.llm_engine.stats
        assert stats is not None and stats.num_preemptions > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["cohere2", "gptneox"])
def test_processes_that_share_it_give_the_same(name: str, tmp_path: Path) -> None:
    folder = make_fallback_checkpoint(name, tmp_path)
    expected = parity.oracle_of(folder, parity.prompts_of(name, WHICH), NUM_TOKENS)
    with parity.engine(folder, model_impl="transformers", skip_tokenizer_init=True, tensor_parallel_size=2) as llm:
        parity.check(expected, generate(llm, expected.prompts))
