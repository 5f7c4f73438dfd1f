"""E2E: an engine generates the oracle's tokens, with parallelism, prefix caching, chunked prefill and preemption."""

from __future__ import annotations

from typing import Any

import pytest

from mvllm.extension_api.testing import checked_attention_backend, enter_phase
from mvllm.plugin_api import ConfigError, Phase
from mvllm_conformance.attention_cases import make_spec
from mvllm_conformance.markers import clause, exhaustive, skip_not_claimed, skip_not_run
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.plugin import DeviceHolder
from mvllm_conformance.rank_launcher import known_start_error, parallel_config, ranks_skip_reason, topology_of
from mvllm_conformance.zoo import (
    ENGINE_LEN,
    FAMILIES,
    LONG,
    MAX_LEN,
    NUM_TOKENS,
    STATE_FAMILY,
    Zoo,
    assert_tokens,
    generate,
    main_dtype,
    make_llm,
    tie_of,
)

PLAIN = [family for family in FAMILIES if "-" not in family]


def some(*kept: str) -> list[Any]:
    """The families as parameters; those not named are exhaustive cases, which --quick leaves out."""
    return [pytest.param(family, marks=() if family in kept else exhaustive) for family in PLAIN]


def check(subject: PlatformUnderTest, zoo: Zoo, family: str, dtype: str | None = None, **settings: Any) -> None:
    """Generates with one engine: all prompts in one batch, then one alone."""
    expected = zoo.oracle(family)
    dtype = dtype or main_dtype(subject.capabilities)
    tie = tie_of(subject.capabilities, dtype)
    with make_llm(subject, expected.folder, dtype=dtype, **settings) as llm:
        assert_tokens(zoo, family, expected, generate(llm, expected.prompts), tie)
        [alone] = generate(llm, expected.prompts[-1:])
        if tie == 0:
            assert list(alone.outputs[0].token_ids) == expected.tokens[-1]


@clause("E2E-01")
@pytest.mark.parametrize("family", some("llama"))
def test_one_worker_generates_the_oracles_tokens(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, family: str
) -> None:
    check(subject, zoo, family)


@clause("E2E-01")
def test_every_claimed_dtype_generates_the_oracles_tokens_up_to_ties(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, claimed_dtype: str
) -> None:
    check(subject, zoo, "llama", claimed_dtype)


@clause("E2E-01", needs="sliding_window")
def test_a_model_with_a_window_generates_the_oracles_tokens(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo
) -> None:
    check(subject, zoo, "mistral-window")


def check_parallel(subject: PlatformUnderTest, zoo: Zoo, family: str, tensor: int, pipeline: int) -> None:
    """Generates with two ranks; if the platform does not support them, checks that the engine refuses them."""
    topology = topology_of(subject, parallel_config(tensor, pipeline))
    sizes: dict[str, Any] = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    wanted = ("all_reduce", "all_gather") if tensor > 1 else ("send_recv",)
    missing = [name for name in wanted if name not in subject.capabilities.collectives]
    possible = "mp" in topology.executors or topology.num_workers == 1
    if not possible or (subject.capabilities.torch_device and topology.num_workers > 1 and missing):
        with pytest.raises(ConfigError):
            make_llm(subject, zoo.checkpoint(family), **sizes).__enter__()
        skip_not_claimed(f"two worker processes: {', '.join(missing) or 'executors ' + ', '.join(topology.executors)}")
    is_core_worker = subject.capabilities.torch_device and subject.platform.worker_class() is None
    if is_core_worker and tensor % (tensor * pipeline // topology.num_workers):
        with pytest.raises(ConfigError, match="several pipeline stages"):
            make_llm(subject, zoo.checkpoint(family), **sizes).__enter__()
        skip_not_claimed("several pipeline stages in one worker: its devices share layers")
    if topology.num_workers > 1 and (why := ranks_skip_reason(subject, tensor, pipeline)):
        skip_not_run(why)
    if topology.num_workers > 1 and (why := known_start_error(subject, topology.num_workers)):
        pytest.fail(f"the ranks of a group do not find each other (COM-01): {why}", pytrace=False)
    check(subject, zoo, family, **sizes)


@clause("E2E-02")
@pytest.mark.parametrize("family", some("llama"))
def test_two_tensor_parallel_workers_generate_the_same(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, family: str
) -> None:
    check_parallel(subject, zoo, family, 2, 1)


@clause("E2E-03")
@pytest.mark.parametrize("family", some("gpt2"))
def test_two_pipeline_stages_generate_the_same(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, family: str
) -> None:
    check_parallel(subject, zoo, family, 1, 2)


@clause("E2E-04")
def test_a_cached_prefix_changes_no_token(subject: PlatformUnderTest, free_device: None, zoo: Zoo) -> None:
    tie = tie_of(subject.capabilities, main_dtype(subject.capabilities))
    with make_llm(subject, zoo.checkpoint("llama"), **LONG) as llm:
        size = llm.llm_engine.cache_summary.block_size
        length = size + 5
        if length + NUM_TOKENS > MAX_LEN:
            skip_not_run(f"blocks of {size} tokens exceed the length of the test's model")
        expected = zoo.oracle("llama", (length,))
        assert_tokens(zoo, "llama", expected, generate(llm, expected.prompts), tie)
        again = generate(llm, expected.prompts)
        assert_tokens(zoo, "llama", expected, again, tie)
        assert again[0].num_cached_tokens == size


@clause("E2E-05")
@pytest.mark.parametrize("family", some("llama"))
def test_chunks_of_a_prompt_change_no_token(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, family: str
) -> None:
    check(subject, zoo, family, max_num_seqs=8, max_num_batched_tokens=11)


@clause("E2E-06")
def test_a_request_that_was_preempted_changes_no_token(
    subject: PlatformUnderTest, device_holder: DeviceHolder, free_device: None, zoo: Zoo
) -> None:
    tie = tie_of(subject.capabilities, main_dtype(subject.capabilities))
    small = {"block_size": size} if (size := smallest_block(subject, device_holder)) else {}
    with make_llm(subject, zoo.checkpoint("llama"), **small) as llm:
        summary = llm.llm_engine.cache_summary
        size, bytes_per_block = summary.block_size, summary.total_bytes // summary.num_blocks
    # Each request starts with one block and ends with three. Two of them fit into four blocks at first, but not later.
    prompt_len, num_tokens = size - 4, size + 8
    longest = prompt_len + num_tokens
    if longest > MAX_LEN or num_tokens > 100:
        skip_not_run(f"blocks of {size} tokens are too long for the test's model and its oracle")
    expected = zoo.oracle("llama", (prompt_len,) * 3, num_tokens)
    limits = {"max_model_len": longest, "max_num_batched_tokens": max(longest, ENGINE_LEN)}
    settings = {**limits, "kv_cache_memory_bytes": 4 * bytes_per_block, **small}
    with make_llm(subject, expected.folder, **settings) as llm:
        assert_tokens(zoo, "llama", expected, generate(llm, expected.prompts, max_tokens=num_tokens), tie)
        stats = llm.llm_engine.stats
        assert stats is not None and stats.num_preemptions > 0, "no request was preempted, so the test tested nothing"


def bits_of(output: Any) -> tuple[list[int], list[float]]:
    """Tokens of a finished request, and their log-probabilities."""
    [sequence] = output.outputs
    tokens = list(sequence.token_ids)
    return tokens, [entry[token].logprob for token, entry in zip(tokens, sequence.logprobs, strict=True)]


@clause("E2E-07")
@pytest.mark.parametrize("family", [*some("llama"), pytest.param(STATE_FAMILY, marks=exhaustive)])
def test_batch_invariant_log_probabilities_have_the_same_bits(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, claimed_dtype: str, family: str
) -> None:
    if family == STATE_FAMILY and not subject.capabilities.state:
        skip_not_claimed("state")
    expected = zoo.oracle("llama")
    settings: dict[str, Any] = {"dtype": claimed_dtype, "batch_invariant": True}
    try:
        engine = make_llm(subject, zoo.checkpoint(family), **settings)
    except ConfigError as e:  # the family has an operation without a batch-invariant provider
        if family == "llama":
            raise
        skip_not_claimed(f"batch_invariant for {family}: {e}")
    with engine as llm:
        alone = [bits_of(generate(llm, [prompt], logprobs=0)[0]) for prompt in expected.prompts]
        for _ in range(2):  # the second time prompts are in the cache
            assert [bits_of(output) for output in generate(llm, expected.prompts, logprobs=0)] == alone
        for prompt, (tokens, logprobs) in zip(expected.prompts, alone, strict=True):
            [forced] = generate(llm, [prompt + tokens], max_tokens=0, prompt_logprobs=0)
            entries = forced.prompt_logprobs[len(prompt) :]
            assert [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)] == logprobs
    if subject.capabilities.chunked_prefill:
        with make_llm(subject, zoo.checkpoint(family), max_num_batched_tokens=11, **settings) as llm:
            assert [bits_of(output) for output in generate(llm, expected.prompts, logprobs=0)] == alone


def smallest_block(subject: PlatformUnderTest, device_holder: DeviceHolder) -> int | None:
    """The smallest supported block size of at least 8 tokens; None if the platform's own worker chooses it."""
    if not subject.capabilities.torch_device or subject.platform.worker_class() is not None:
        return None
    device_holder.open()
    with enter_phase(Phase.WORKER):
        backend = checked_attention_backend(subject.platform, make_spec(dtype=main_dtype(subject.capabilities)))
        sizes = backend.kv_layout().block_sizes
    device_holder.close()
    return min((size for size in sizes if size >= 8), default=None)
