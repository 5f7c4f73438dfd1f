"""Several worker processes give the tokens of transformers: shards, stages, and both; one model per family."""

from __future__ import annotations

import pytest

from tests.helpers import parity

# A small budget cuts prompts into chunks.
TIGHT = {"max_num_seqs": 8, "max_num_batched_tokens": 32}


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen2", "qwen3", "opt", "gpt2"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_worker_processes_give_the_tokens_of_transformers(name: str, tensor: int, pipeline: int) -> None:
    expected = parity.oracle(name)
    with parity.engine(expected.folder, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **TIGHT) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts))
        again = parity.generate(llm, expected.prompts)
        parity.check(expected, again)
        assert max(output.num_cached_tokens for output in again) > 0


def test_shards_and_stages_together_survive_preemption() -> None:
    expected = parity.oracle("llama-gqa")
    with parity.engine(
        expected.folder, tensor_parallel_size=2, pipeline_parallel_size=2, kv_cache_memory_bytes=200_000, **TIGHT
    ) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts))
        stats = llm.llm_engine.stats
        assert stats is not None and stats.num_preemptions > 0
