"""Overhead per step of a worker process over an in-process worker: `python -m tests.perf.executor_overhead`.

Both run the worker of mvllm-null-device, which computes nothing, on a plan of 64 generating requests, a fourth of which
get a block. Prints microseconds from `execute_model` to the result.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import replace_field
from mvllm.executor.interface import Executor
from mvllm.executor.multiproc import MultiprocExecutor
from mvllm.executor.uniproc import UniProcExecutor
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.platform.choose import choose_platform
from tests.helpers.plugins import null_platform_path

NUM_REQUESTS = 64
WARM_UP = 500
STEPS = 5000


def plan_of(step: int) -> SchedulerOutput:
    rows = list(range(NUM_REQUESTS))
    return SchedulerOutput(
        step=step + 1000,
        new_block_rows=rows[step % 4 :: 4],
        new_block_ids=[step * NUM_REQUESTS + row for row in rows[step % 4 :: 4]],
        rows=rows,
        num_scheduled_tokens=[1] * NUM_REQUESTS,
        total_num_scheduled_tokens=NUM_REQUESTS,
    )


def microseconds_per_step(executor: Executor, pause: float) -> list[float]:
    times = []
    for step in range(WARM_UP + (STEPS if not pause else STEPS // 10)):
        plan = plan_of(step)
        if pause:
            time.sleep(pause)
        start = time.perf_counter()
        output = executor.execute_model(plan).result()
        times.append((time.perf_counter() - start) * 1e6)
        assert len(output.sampled_token_ids) == NUM_REQUESTS
    return times[WARM_UP:]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sys.path[:0] = null_platform_path(Path(folder))
        platform = choose_platform("null").platform
        config = EngineArgs.from_kwargs(model="demo").create_engine_config()
        config = replace_field(config, "parallel.distributed_executor_backend", "mp")
        executors: dict[str, Executor] = {
            "uni": UniProcExecutor(config, platform),
            "mp": MultiprocExecutor(config, platform),
        }
        for pause, label in ((0.0, "steps back to back"), (0.005, "5 ms between steps")):
            p50 = {}
            print(label)
            for name, executor in executors.items():
                times = sorted(microseconds_per_step(executor, pause))
                p50[name] = statistics.median(times)
                print(f"  {name:4} p50 {p50[name]:7.1f}   p99 {times[len(times) * 99 // 100]:7.1f}")
            print(f"  mp minus uni: {p50['mp'] - p50['uni']:.1f} µs per step (target: under 150)")
        for executor in executors.values():
            executor.shutdown()


if __name__ == "__main__":
    main()
