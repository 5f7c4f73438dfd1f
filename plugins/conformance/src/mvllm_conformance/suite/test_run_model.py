"""RUN: core's worker and model runner on the platform, on tiny models of each family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mvllm.extension_api import WorkerWrapper
from mvllm.extension_api.testing import EngineArgs, enter_phase, resolve_config, size_kv_cache
from mvllm.plugin_api import (
    DeviceRuntime,
    KVCacheNeeds,
    ModelRunnerOutput,
    NewRequestData,
    Phase,
    PositionLogprobs,
    SamplingParams,
    SchedulerOutput,
    WorkerContext,
)
from mvllm_conformance.markers import clause, exhaustive
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.plugin import DeviceHolder
from mvllm_conformance.zoo import FAMILIES, LOGPROB_TOLERANCE, Zoo, main_dtype

LENGTHS = (3, 21, 40)
LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 128}


@contextmanager
def worker(subject: PlatformUnderTest, folder: Path, dtype: str) -> Iterator[tuple[WorkerWrapper, int, int]]:
    """A started worker, its number of KV blocks and their size."""
    args = EngineArgs.from_kwargs(
        model=str(folder),
        platform=subject.name,
        dtype=dtype,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        **LIMITS,
    )
    config = resolve_config(args.create_engine_config(), subject.platform)
    wrapper = WorkerWrapper(config, subject.platform, WorkerContext())
    try:
        wrapper.call("init_device")
        wrapper.call("load_model")
        needs: KVCacheNeeds = wrapper.call("kv_cache_needs")
        available = wrapper.call("available_kv_bytes")
        summary = size_kv_cache(config, [needs], [min(available, 2**26)])
        wrapper.call("allocate_kv_cache", summary.num_blocks, summary.block_size)
        wrapper.call("warm_up")
        yield wrapper, summary.num_blocks, summary.block_size
    finally:
        wrapper.shutdown()
        wrapper.shutdown()


def prompts_in_one_step(prompts: list[list[int]], block_size: int, step: int = 0) -> SchedulerOutput:
    """A step that computes whole prompts and returns the log-probabilities of their tokens."""
    new, next_block = [], 0
    for row, prompt in enumerate(prompts):
        count = -(-(len(prompt) + 1) // block_size)
        new.append(
            NewRequestData(
                request_id=str(row),
                row=row,
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                num_computed_tokens=0,
                block_ids=list(range(next_block, next_block + count)),
                sampling_params=SamplingParams(temperature=0, logprobs=1, prompt_logprobs=1, max_tokens=4),
                eos_token_ids=[],
            )
        )
        next_block += count
    lengths = [len(prompt) for prompt in prompts]
    return SchedulerOutput(
        step=step,
        new_requests=new,
        rows=list(range(len(prompts))),
        num_scheduled_tokens=lengths,
        total_num_scheduled_tokens=sum(lengths),
    )


def assert_logprobs(zoo: Zoo, family: str, prompts: list[list[int]], output: ModelRunnerOutput, allowed: float) -> None:
    for row, prompt in enumerate(prompts):
        exact = zoo.logits(family, prompt).double().log_softmax(dim=-1)
        positions: list[PositionLogprobs] = [*output.prompt_logprobs.get(row, []), output.logprobs[row]]
        assert len(positions) == len(prompt), f"{family}: a row of logits for each token of the prompt"
        for i, entry in enumerate(positions):
            for token, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
                off = abs(logprob - float(exact[i, token]))
                assert off < allowed, f"{family}, prompt of {len(prompt)}, position {i}: off by {off:.2g}"


@clause("RUN-01")
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in ("llama", "gpt2") else exhaustive) for f in FAMILIES if "-" not in f]
)
def test_a_model_of_each_family_gives_the_oracles_log_probabilities(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, claimed_dtype: str, family: str
) -> None:
    check_family(subject, zoo, claimed_dtype, family)


@clause("RUN-01", needs="sliding_window")
def test_a_model_with_a_sliding_window_does_too(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, claimed_dtype: str
) -> None:
    check_family(subject, zoo, claimed_dtype, "mistral-window")


def output_of(wrapper: WorkerWrapper, plan: SchedulerOutput) -> ModelRunnerOutput:
    """Runs one step and collects its output."""
    output = wrapper.execute_model(plan)
    if output is None:
        output = wrapper.call("collect_output", plan.step)
    assert isinstance(output, ModelRunnerOutput)
    return output


def check_family(subject: PlatformUnderTest, zoo: Zoo, dtype: str, family: str) -> None:
    prompts = zoo.oracle(family, LENGTHS).prompts
    with worker(subject, zoo.checkpoint(family), dtype) as (wrapper, _, block_size):
        output = output_of(wrapper, prompts_in_one_step(prompts, block_size))
        assert not output.errors
        assert_logprobs(zoo, family, prompts, output, LOGPROB_TOLERANCE.get(dtype, 1.0))


@clause("RUN-02")
def test_the_worker_goes_through_its_life_in_order(subject: PlatformUnderTest, free_device: None, zoo: Zoo) -> None:
    """Core's worker or the platform's: it returns an output for every step, is healthy, and can be shut down twice."""
    with worker(subject, zoo.checkpoint("llama"), main_dtype(subject.capabilities)) as (wrapper, num_blocks, size):
        assert num_blocks > 0 and size > 0
        wrapper.call("check_health")
        output = output_of(wrapper, prompts_in_one_step([[5, 6, 7]], size))
        assert (output.step, len(output.sampled_token_ids)) == (0, 1)
        empty = output_of(wrapper, SchedulerOutput(step=1, freed_rows=[0]))
        assert (empty.step, list(empty.sampled_token_ids)) == (1, [])


@clause("RUN-02", needs="torch_device")
def test_profiling_leaves_no_more_than_the_device_has(
    subject: PlatformUnderTest, device_holder: DeviceHolder, free_device: None, zoo: Zoo
) -> None:
    runtime: DeviceRuntime = device_holder.open()
    with enter_phase(Phase.WORKER):
        total = runtime.memory().total
    device_holder.close()
    folder = zoo.checkpoint("llama")
    args = EngineArgs.from_kwargs(
        model=str(folder), platform=subject.name, skip_tokenizer_init=True, use_tqdm_on_load=False, **LIMITS
    )
    config = resolve_config(args.create_engine_config(), subject.platform)
    wrapper = WorkerWrapper(config, subject.platform, WorkerContext())
    try:
        wrapper.call("init_device")
        wrapper.call("load_model")
        needs: KVCacheNeeds = wrapper.call("kv_cache_needs")
        assert needs.bytes_per_token > 0 and needs.block_sizes
        first = wrapper.call("available_kv_bytes")
        assert 0 < first < total
        wrapper.call("allocate_kv_cache", 16, needs.block_sizes[0])
    finally:
        wrapper.shutdown()
