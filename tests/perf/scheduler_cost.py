"""Microseconds to plan a step and to process its results: python tests/perf/scheduler_cost.py

Steady decode: every request has finished prefill and none ends. No torch, no worker; tokens are generated beforehand.
Each result is the median of several runs whose number of steps is a multiple of the block size, so that block
allocation is included.

With `--long-prompts` it prints how long short requests wait next to a long prompt, in steps and in computed tokens
until their first token, and how many steps the long prompt takes alone. These are counts, the same on every machine.
"""

from __future__ import annotations

import argparse
import statistics
import time

from mvllm.config.engine_config import SchedulerConfig
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.messages.requests import EngineCoreRequest
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams
from mvllm.messages.scheduler_output import ModelRunnerOutput
from mvllm.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_LEN = 32


def decoding_scheduler(num_running: int, output_kind: RequestOutputKind) -> Scheduler:
    """A scheduler whose requests have all finished their first step."""
    max_model_len = 8192
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=max(2048, num_running * PROMPT_LEN)),
        max_model_len=max_model_len,
        kv_cache=KVCacheManager(num_blocks=num_running * max_model_len // BLOCK_SIZE, block_size=BLOCK_SIZE),
    )
    for i in range(num_running):
        params = SamplingParams(max_tokens=None, output_kind=output_kind, detokenize=False)
        prompt = [i * PROMPT_LEN + p for p in range(PROMPT_LEN)]
        scheduler.add_request(
            EngineCoreRequest(
                request_id=str(i), prompt_token_ids=prompt, sampling_params=params, eos_token_ids=[2_000_000]
            )
        )
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, ModelRunnerOutput(step=plan.step, sampled_token_ids=[5] * num_running))
    assert scheduler.num_running == num_running
    return scheduler


def measure(scheduler: Scheduler, num_running: int, num_steps: int) -> tuple[float, float]:
    """Seconds per step of `schedule` and of `update_from_output`."""
    tokens = list(range(num_running))
    clock = time.perf_counter
    plan_time = update_time = 0.0
    for _ in range(num_steps):
        start = clock()
        plan = scheduler.schedule()
        planned = clock()
        output = ModelRunnerOutput(step=plan.step, sampled_token_ids=tokens)
        answered = clock()
        scheduler.update_from_output(plan, output)
        update_time += clock() - answered
        plan_time += planned - start
    return plan_time / num_steps, update_time / num_steps


def run_long_prompt(threshold: int | None, num_short: int, *, budget: int = 2048, length: int = 100_000) -> list[int]:
    """Computes a long prompt; `num_short` requests of 300 tokens arrive after its first step.

    Returns:
        Steps until the first and the last short request has its first token, tokens computed until then, and steps
        until the long prompt has its own.
    """
    config = SchedulerConfig(max_num_batched_tokens=budget, long_prefill_token_threshold=threshold)
    scheduler = Scheduler(
        config,
        max_model_len=length + 8,
        kv_cache=KVCacheManager(num_blocks=2 * length // BLOCK_SIZE, block_size=BLOCK_SIZE),
    )

    def add(name: str, num_tokens: int) -> None:
        params = SamplingParams(max_tokens=1, detokenize=False)
        prompt = [hash((name, i)) % 100_000 for i in range(num_tokens)]
        scheduler.add_request(
            EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, eos_token_ids=[])
        )

    add("long", length)
    steps: dict[str, int] = {}
    computed, until = 0, 0
    while scheduler.has_requests():
        plan = scheduler.schedule()
        if plan.step == 0:
            for i in range(num_short):
                add(f"short {i}", 300)
        output = ModelRunnerOutput(step=plan.step, sampled_token_ids=[5] * len(plan.rows))
        ends = {request.row for request in scheduler.requests.running if request.has_token_in_flight}
        output.sampled_token_ids = [5 if row in ends else -1 for row in plan.rows]
        ended = [each.request_id for each in scheduler.update_from_output(plan, output).outputs]
        if plan.step and len(steps) < num_short:
            computed += plan.total_num_scheduled_tokens
        for name in ended:
            if name == "long":
                until = plan.step + 1
            else:
                steps[name] = plan.step
    short = list(steps.values()) or [0]
    return [min(short), max(short), computed, until]


def print_long_prompts() -> None:
    """The table of `--long-prompts`."""
    print("a prompt of 100,000 tokens, budget 2048; short requests of 300 tokens come after its first step\n")
    print(
        "threshold   short requests   steps to their first tokens   tokens computed till then   steps of the long one"
    )
    for threshold in (0, None, 512):
        for num_short in (0, 1, 16, 64):
            first, last, computed, steps = run_long_prompt(threshold, num_short)
            name = {0: "none", None: "default"}.get(threshold, str(threshold))
            print(f"{name:<12}{num_short:>14}{f'{first} to {last}':>30}{computed:>28,}{steps:>24}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256], help="requests running at once")
    parser.add_argument("--runs", type=int, default=9, help="runs per figure")
    parser.add_argument("--long-prompts", action="store_true", help="waiting beside a long prompt, in steps")
    args = parser.parse_args()
    if args.long_prompts:
        print_long_prompts()
        return
    print("steady decode, µs per step         schedule     update      total   per request")
    for output_kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        for num_running in args.running:
            scheduler = decoding_scheduler(num_running, output_kind)
            measure(scheduler, num_running, BLOCK_SIZE)
            runs = [measure(scheduler, num_running, 4 * BLOCK_SIZE) for _ in range(args.runs)]
            plan, update = (statistics.median(column) * 1e6 for column in zip(*runs, strict=True))
            total = statistics.median(sum(run) for run in runs) * 1e6
            name = f"{num_running} running, {output_kind.name.lower()}"
            print(f"{name:<32}{plan:>11.1f}{update:>11.1f}{total:>11.1f}{total / num_running:>14.2f}")


if __name__ == "__main__":
    main()
