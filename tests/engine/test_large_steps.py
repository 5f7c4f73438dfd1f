"""The largest plans reach every worker whole: through a slot if they fit, else through the overflow socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import ParallelConfig, replace_field
from mvllm.executor.factory import make_executor
from mvllm.executor.message_queue.frames import packed_bytes
from mvllm.executor.multiproc import MultiprocExecutor
from mvllm.executor.rpc_messages import RPCRequest
from mvllm.executor.rpc_queues import request_settings
from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.scheduler_output import NewRequestData, SchedulerOutput
from mvllm.platform.choose import choose_platform
from tests.helpers.plugins import prepend, scripted_platform_path

pytestmark = pytest.mark.fresh_programs  # the scripted workers show that core imports no torch
NUM_REQUESTS = 256
BUDGET = 8192
BLOCK_SIZE = 16
LARGEST_ID = 2**20


def plan(prompt_tokens: int, step: int = 1) -> SchedulerOutput:
    """256 requests that all begin in one step, with token ids, rows and blocks of the largest encoded size."""
    blocks = -(-prompt_tokens // BLOCK_SIZE)
    new = [
        NewRequestData(
            request_id=f"chatcmpl-{row:032x}",
            row=row,
            token_ids=[LARGEST_ID + row + i for i in range(prompt_tokens)],
            num_prompt_tokens=prompt_tokens,
            num_computed_tokens=0,
            block_ids=[LARGEST_ID + i for i in range(blocks)],
            sampling_params=SamplingParams(
                temperature=0.7, top_p=0.9, top_k=50, seed=2**62, stop=["\n\n"], stop_token_ids=[1, 2, 3]
            ),
            eos_token_ids=[LARGEST_ID, LARGEST_ID + 1],
        )
        for row in range(NUM_REQUESTS)
    ]
    return SchedulerOutput(
        step=step,
        new_requests=new,
        rows=list(range(NUM_REQUESTS)),
        num_scheduled_tokens=[BUDGET // NUM_REQUESTS] * NUM_REQUESTS,
    )


def message_bytes(step: SchedulerOutput) -> int:
    request = RPCRequest(2**32, "execute_model", msgspec.msgpack.encode((step,)), None, 0)
    return packed_bytes([msgspec.msgpack.encode(request)])


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[object]:
    prepend(monkeypatch, scripted_platform_path(tmp_path / "scripted_worker"))
    monkeypatch.setenv("SCRIPTED_WORKER", "count")
    with ExitStack() as stack:

        def build(**settings: object) -> MultiprocExecutor:
            args = EngineArgs.from_kwargs(model="demo", distributed_executor_backend="mp", **settings)
            config = replace_field(args.create_engine_config(), "parallel.tensor_parallel_size", 2)
            executor = make_executor(config, choose_platform("scripted").platform)
            assert isinstance(executor, MultiprocExecutor)
            stack.callback(executor.shutdown)
            return executor

        yield build


def sums(step: SchedulerOutput) -> list[int]:
    return [sum(request.token_ids) for request in step.new_requests]


def test_256_prompts_that_fill_the_token_budget_fit_a_slot_of_the_default_size() -> None:
    step = plan(BUDGET // NUM_REQUESTS)
    assert message_bytes(step) <= request_settings(ParallelConfig()).slot_bytes


def test_plans_of_any_size_reach_every_worker_whole_and_in_order(make) -> None:
    executor = make()
    slot = request_settings(ParallelConfig()).slot_bytes
    small, large = plan(BUDGET // NUM_REQUESTS), plan(2000)  # prompts far beyond the budget are sent whole as well
    assert message_bytes(small) <= slot < message_bytes(large)
    for number in range(6):
        step = msgspec.structs.replace(large if number % 2 else small, step=number)
        output = executor.execute_model(step).result()
        assert (output.step, output.sampled_token_ids) == (number, sums(step))


def test_the_settings_decide_how_large_the_queues_are(make) -> None:
    executor = make(mq_num_slots=4, mq_slot_bytes=1 << 16, mq_spin_seconds=0)
    requests = executor._writer._ring
    assert (requests.num_slots, requests.slot_bytes) == (4, 1 << 16)
    replies = executor._replies._readers[0].source._in._ring
    assert (replies.num_slots, replies.slot_bytes) == (4, 1 << 14)
    step = plan(BUDGET // NUM_REQUESTS)
    assert message_bytes(step) > 1 << 16, "goes over the socket"
    assert executor.execute_model(step).result().sampled_token_ids == sums(step)
