"""Sparse attention in the engine: chunks and prefix hits, several ranks, and other storage dtypes."""

from __future__ import annotations

import pytest

from tests.helpers import parity
from tests.helpers.thread_executor import ThreadExecutor

WHICH = (2, 8, 11)
THREADS = f"{ThreadExecutor.__module__}.{ThreadExecutor.__qualname__}"


@pytest.mark.shows("tokens")
@pytest.mark.parametrize("name", ["dsa", pytest.param("glm5", marks=pytest.mark.exhaustive)])
def test_chunks_of_prompts_and_prefix_hits_give_the_tokens_of_transformers(name: str) -> None:
    expected = parity.oracle(name, (8,), 8)
    with parity.engine(expected.folder, max_num_batched_tokens=11, max_num_seqs=8) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts, max_tokens=8))
        again = parity.generate(llm, expected.prompts, max_tokens=8)
        parity.check(expected, again)
        assert again[0].num_cached_tokens == 32


@pytest.mark.exhaustive
@pytest.mark.shows("layout")
@pytest.mark.parametrize("name", ["dsa", "glm5"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_give_the_tokens_of_transformers(name: str, tensor: int, pipeline: int) -> None:
    expected = parity.oracle(name, WHICH)
    settings = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "max_num_batched_tokens": 32}
    with parity.engine(expected.folder, distributed_executor_backend=THREADS, **settings) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts))
        parity.check(expected, parity.generate(llm, expected.prompts))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_index_keys_are_stored_in_the_dtype_of_the_cache(kv_dtype: str) -> None:
    """Rounded keys change some selections, so tokens differ from transformers'; alone and in a batch they are equal."""
    expected = parity.oracle("dsa", WHICH)
    with parity.engine(expected.folder, kv_cache_dtype=kv_dtype, enable_prefix_caching=False) as llm:
        bytes_per_token = llm.llm_engine.cache_summary.total_bytes // llm.llm_engine.cache_summary.num_blocks // 16
        together = parity.generate(llm, expected.prompts, max_tokens=16)
        alone = [parity.generate(llm, [prompt], max_tokens=16)[0] for prompt in expected.prompts]
    # The platform stores the 40 elements of a latent vector in 64, as its kernels read them.
    of_vectors = {"bfloat16": 2 * 16 + 2 * 64, "int8": 16 + 64 + 8, "float8_e4m3fn": 16 + 64 + 8}[kv_dtype]
    assert bytes_per_token == 2 * of_vectors
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
