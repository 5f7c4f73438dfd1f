"""How the KV cache is sized, and what is said when it does not fit."""

from __future__ import annotations

import re

import pytest

from mvllm.errors import CacheError, ModelError
from tests.engine.conftest import MakeLLM

BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4  # layers, key and value, heads, head size, float32
BLOCK = 16 * BYTES_PER_TOKEN


def test_the_cache_is_no_larger_than_all_requests_together_could_use(make_llm: MakeLLM) -> None:
    summary = make_llm(max_num_seqs=3, max_model_len=40, kv_cache_memory_bytes=2**28).llm_engine.cache_summary
    assert summary.num_blocks == 3 * 3
    assert summary.max_concurrency == 3


def test_explicit_bytes_are_used_to_the_last_block(make_llm: MakeLLM) -> None:
    summary = make_llm(kv_cache_memory_bytes=20 * BLOCK + BLOCK - 1).llm_engine.cache_summary
    assert (summary.num_blocks, summary.total_bytes) == (20, 20 * BLOCK)


def test_the_start_line_names_tokens_and_concurrent_requests(make_llm: MakeLLM) -> None:
    text = str(make_llm(kv_cache_memory_bytes=22 * BLOCK, max_model_len=176).llm_engine.cache_summary)
    assert "352 tokens" in text and "2.0 concurrent requests of 176 tokens" in text


def test_measured_memory_is_what_a_profiling_step_leaves(make_llm: MakeLLM) -> None:
    summary = make_llm(kv_cache_memory_bytes=None, max_num_seqs=2).llm_engine.cache_summary
    assert summary.num_blocks == 2 * 11


def test_too_little_memory_for_one_request_is_refused_with_the_length_that_fits(make_llm: MakeLLM) -> None:
    with pytest.raises(CacheError) as caught:
        make_llm(kv_cache_memory_bytes=7 * BLOCK, max_model_len=176)
    message = str(caught.value)
    assert "176" in message and "kv_cache_memory_bytes" in message
    fits = re.search(r"set max_model_len to (\d+) or less", message)
    needs = re.search(r"raise kv_cache_memory_bytes to (\d+)", message)
    assert fits and needs and (int(fits[1]), int(needs[1])) == (7 * 16, 11 * BLOCK)
    # Both remedies work.
    make_llm(kv_cache_memory_bytes=7 * BLOCK, max_model_len=int(fits[1]))
    make_llm(kv_cache_memory_bytes=int(needs[1]), max_model_len=176)


def test_a_block_size_that_no_backend_takes_is_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(CacheError, match="block_size 7"):
        make_llm(block_size=7)


def test_a_model_or_a_cache_that_finds_no_memory_is_an_error_in_the_users_terms(make_llm: MakeLLM) -> None:
    with pytest.raises(ModelError, match=r"config\.json gives, cannot be allocated"):
        make_llm(hf_overrides={"intermediate_size": 2**45}, load_format="dummy")
    with pytest.raises(CacheError, match=r"KV cache of .* cannot be allocated"):
        make_llm(
            kv_cache_memory_bytes=2**60,
            max_num_seqs=2**16,
            max_num_batched_tokens=2**16,
            max_model_len=2**20,
            hf_overrides={"max_position_embeddings": 2**20},
        )
