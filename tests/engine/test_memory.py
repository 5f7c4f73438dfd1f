"""Sizing of the KV cache, and the errors if it does not fit."""

from __future__ import annotations

import re
import resource

import pytest

from mvllm import SamplingParams
from mvllm.errors import CacheError, ModelError, RequestError
from tests.engine.conftest import MakeLLM

BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4  # layers, key and value, heads, head size, float32
BLOCK = 16 * BYTES_PER_TOKEN


def test_the_cache_uses_the_given_memory_and_keeps_prefixes(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=1, max_model_len=40, kv_cache_memory_bytes=32 * BLOCK)
    assert llm.llm_engine.cache_summary.num_blocks == 32
    prompts = [{"prompt_token_ids": [5 + i] * 33} for i in range(10)]
    params = SamplingParams(temperature=0, max_tokens=1)
    for hits in (0, 32):  # the second time all prefixes are cached, though only one request runs at a time
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [hits] * 10


def test_without_prefix_caching_the_cache_is_no_larger_than_all_requests_together_could_use(
    make_llm: MakeLLM,
) -> None:
    settings = {"max_num_seqs": 3, "max_model_len": 40, "kv_cache_memory_bytes": 2**28}
    summary = make_llm(enable_prefix_caching=False, **settings).llm_engine.cache_summary
    assert (summary.num_blocks, summary.max_concurrency) == (3 * 3, 3)


def test_explicit_bytes_are_fully_used(make_llm: MakeLLM) -> None:
    summary = make_llm(kv_cache_memory_bytes=20 * BLOCK + BLOCK - 1).llm_engine.cache_summary
    assert (summary.num_blocks, summary.total_bytes) == (20, 20 * BLOCK)


def test_the_start_line_names_tokens_and_concurrent_requests(make_llm: MakeLLM) -> None:
    text = str(make_llm(kv_cache_memory_bytes=22 * BLOCK, max_model_len=176).llm_engine.cache_summary)
    assert "352 tokens" in text and "2.0 concurrent requests of 176 tokens" in text


def test_the_cache_is_sized_by_the_free_memory_after_a_profiling_step(make_llm: MakeLLM) -> None:
    """This platform claims half of the free memory, but allocates it only as it is used."""
    before = resident_bytes()
    summary = make_llm(kv_cache_memory_bytes=None, max_num_seqs=2).llm_engine.cache_summary
    assert summary.num_blocks > 2 * 11, "more than two sequences could use"
    assert "sized by memory_utilization 0.5" in str(summary)
    assert resident_bytes() - before < summary.total_bytes // 2


def resident_bytes() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as text:
        return int(text.read().split()[1]) * resource.getpagesize()


def test_too_little_memory_for_one_request_is_an_error_with_the_length_that_fits(make_llm: MakeLLM) -> None:
    with pytest.raises(CacheError) as caught:
        make_llm(kv_cache_memory_bytes=7 * BLOCK, max_model_len=176)
    message = str(caught.value)
    assert "176" in message and "kv_cache_memory_bytes" in message
    fits = re.search(r"set max_model_len to (\d+) or less", message)
    needs = re.search(r"raise kv_cache_memory_bytes to (\d+)", message)
    assert fits and needs and (int(fits[1]), int(needs[1])) == (7 * 16, 11 * BLOCK)
    # Both hints of the error work.
    assert "or to auto" in message
    make_llm(kv_cache_memory_bytes=7 * BLOCK, max_model_len=int(fits[1]))
    make_llm(kv_cache_memory_bytes=int(needs[1]), max_model_len=176)


@pytest.mark.parametrize("length", ["auto", -1])
def test_the_longest_length_that_fits_is_chosen_and_used_everywhere(make_llm: MakeLLM, length: object) -> None:
    processes = {"engine_core_process": True, "distributed_executor_backend": "mp"} if length == "auto" else {}
    llm = make_llm(kv_cache_memory_bytes=7 * BLOCK, max_model_len=length, **processes)
    assert llm.model_config.max_model_len == llm.llm_engine.cache_summary.max_model_len == 7 * 16
    prompts = [{"prompt_token_ids": [5] * 100}]
    [output] = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12 and output.outputs[0].finish_reason == "length"
    with pytest.raises(RequestError, match=r"112 \(max_model_len\)"):
        llm.generate([{"prompt_token_ids": [5] * 112}], use_tqdm=False)
    with pytest.raises(RequestError, match=r"Shorten the prompt, or start .* more memory for the KV cache: .* is auto"):
        llm.generate([{"prompt_token_ids": [5] * 113}], use_tqdm=False)
    with make_llm(kv_cache_memory_bytes=7 * BLOCK, max_model_len=112) as fixed:
        [expected] = fixed.generate(
            prompts, SamplingParams(temperature=0, ignore_eos=True, max_tokens=12), use_tqdm=False
        )
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_block_size_that_no_backend_supports_is_rejected(make_llm: MakeLLM) -> None:
    with pytest.raises(CacheError, match="block_size 7"):
        make_llm(block_size=7)


def test_out_of_memory_for_the_model_or_the_cache_is_an_error_that_names_the_settings(make_llm: MakeLLM) -> None:
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
