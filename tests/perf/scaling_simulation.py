"""Simulates a fleet of replicas: routing policies, cell sizes, failures, restarts, overload and autoscaling.

    python -m tests.perf.scaling_simulation policies --replicas 1000
    python -m tests.perf.scaling_simulation restarts --replicas 40 --load 0.3 --seconds 600
    python -m tests.perf.scaling_simulation failures overload autoscaling routers cells disaggregation
    python -m tests.perf.scaling_simulation --measure steps.json          measures the step times of this machine
    python -m tests.perf.scaling_simulation policies --steps steps.json   simulates with them
    python -m tests.perf.scaling_simulation calibration --steps steps.json   compares them with the measured steps
    python -m tests.perf.scaling_simulation policies --replicas 4096 --seconds 30 --policy "least tokens"

Prints tables in Markdown; docs/explanation/scaling.md has them and says what follows. Results depend on the seed and on
nothing else. Step times are assumptions (`fleet/step_times.py`) unless a file of measured ones is given.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.perf.fleet.policies import POLICIES
from tests.perf.fleet.simulator import Change, Fleet, Outcome
from tests.perf.fleet.step_times import ACCELERATOR, StepTimes, fit, read
from tests.perf.fleet.workload import Conversations, Replay, Request, Workload, ideal_hit_rate

AWARE, SPREAD, BLIND = "prefix cost (mvllm)", "prefix cost, spread", "least tokens"
RESTART_SHARES = (0.02, 0.05, 0.1, 0.2)
MOST_ROLLOUT_SECONDS = 5000.0
CONVERSATIONS_PER_REPLICA = 4.5  # per second; about 13 requests, for the assumed accelerator


@dataclass(frozen=True)
class Setup:
    """What all scenarios share."""

    times: StepTimes
    num_replicas: int
    load: float  # factor of CONVERSATIONS_PER_REPLICA
    seconds: float
    seed: int
    policies: tuple[str, ...] = tuple(POLICIES)
    measured: tuple[tuple[float, ...], ...] = ()  # steps, as `fit` takes them
    measured_runs: tuple[tuple[int, int, int, float], ...] = ()  # requests, prompt and output tokens of each, seconds

    @property
    def workload(self) -> Workload:
        rate = CONVERSATIONS_PER_REPLICA * ACCELERATOR.prompt_token / self.times.prompt_token * self.load
        return Workload(rate=rate * self.num_replicas, seconds=self.seconds)

    @property
    def warm_up(self) -> float:
        """Requests that arrive earlier are left out of times."""
        return self.seconds / 3

    def fleet(self, policy: str, workload: Workload | None = None, **options: object) -> Fleet:
        workload = workload or self.workload
        return Fleet(
            self.times,
            self.num_replicas,
            POLICIES[policy](self.num_replicas),
            Conversations(workload, self.seed),
            workload.num_system_prompts,
            **options,  # type: ignore[arg-type]
        )


def milliseconds(values: np.ndarray) -> str:
    """Median and 99th percentile."""
    values = values[~np.isnan(values)]
    if not len(values):
        return "- | -"
    return " | ".join(f"{np.percentile(values, q) * 1e3:,.0f}" for q in (50, 99))


def row(name: str, outcome: Outcome, start: float) -> str:
    late = outcome.arrival >= start
    times = f"{milliseconds(outcome.ttft[late])} | {milliseconds(outcome.tpot[late])}"
    return f"| {name} | {100 * outcome.hit_rate:.1f} % | {times} |"


HEAD = "| | cached prompt tokens | TTFT p50, ms | p99 | TPOT p50, ms | p99 |\n|---|---|---|---|---|---|"


def policies(setup: Setup) -> Iterable[str]:
    """Routing policies at one load."""
    yield HEAD
    fleet = None
    for name in setup.policies:
        fleet = setup.fleet(name)
        yield row(name, fleet.run(setup.seconds), setup.warm_up)
    assert fleet is not None
    yield f"\nAn endless cache shared by all replicas would have {100 * ideal_hit_rate(fleet.requests):.1f} %."


def cells(setup: Setup) -> Iterable[str]:
    """The same load per replica, in cells of different sizes."""
    yield HEAD
    for count in (4, 16, 64, 256):
        smaller = replace(setup, num_replicas=count)
        for name in (BLIND, AWARE):
            yield row(f"{count} replicas, {name}", smaller.fleet(name).run(setup.seconds), setup.warm_up)


def routers(setup: Setup) -> Iterable[str]:
    """Several routers with loads that are reported now and then."""
    yield HEAD
    for count, seconds in ((1, 0.0), (1, 0.1), (8, 0.1), (8, 1.0), (8, 5.0), (64, 1.0)):
        for name in (BLIND, "two choices", AWARE, SPREAD, "prefix cost, holders and two"):
            fleet = setup.fleet(name, num_routers=count, report_seconds=seconds)
            label = f"{count} router{'s' * (count > 1)}, loads {f'every {seconds:g} s' if seconds else 'exact'}, {name}"
            yield row(label, fleet.run(setup.seconds), setup.warm_up)


def failures(setup: Setup) -> Iterable[str]:
    """A twentieth of the replicas fails at once, or becomes slow; after 40 s they are back, with empty caches.

    "During" contains the requests that came in the 10 seconds before: most of those that were lost.
    """
    begun, lasts = setup.seconds / 2, 40.0
    some = range(0, setup.num_replicas, 20)

    def fail(fleet: Fleet, now: float) -> None:
        for index in some:
            fleet.fail(index, now)

    def slow_down(fleet: Fleet, now: float) -> None:
        for index in some:
            fleet.replicas[index].advance(now)
            fleet.replicas[index].speed = 0.25

    def restore(fleet: Fleet, now: float) -> None:
        for index in some:
            if fleet.replicas[index].is_alive:
                fleet.replicas[index].speed = 1.0
            else:
                fleet.start(index, now)

    yield "| 5 % of the replicas | TTFT p50 before, ms | p99 | during | p99 | after | p99 | sent again |"
    yield "|---|---|---|---|---|---|---|---|"
    for what, change in (("fail", fail), ("become 4 times as slow", slow_down)):
        for name in ("round robin", BLIND, AWARE):
            fleet = setup.fleet(name, changes=[(begun, change), (begun + lasts, restore)])
            outcome = fleet.run(setup.seconds)
            spans = ((setup.warm_up, begun - 10), (begun - 10, begun + lasts), (begun + lasts, setup.seconds))
            values = " | ".join(milliseconds(outcome.between(*span)) for span in spans)
            yield f"| {what}, {name} | {values} | {outcome.num_retries} |"


def restarts(setup: Setup) -> Iterable[str]:
    """All replicas are restarted, some at a time: they drain, load for 20 s, and come back with empty caches.

    Requests come until all have been restarted.
    """
    longest = replace(setup.workload, seconds=MOST_ROLLOUT_SECONDS)
    yield "| at a time | whole rollout, s | TTFT p50 before, ms | p99 | during | p99 | cached prompt tokens |"
    yield "|---|---|---|---|---|---|---|"
    for share in RESTART_SHARES:
        size = max(1, round(setup.num_replicas * share))
        begun = end = setup.seconds
        done: list[float] = []
        fleet = setup.fleet(AWARE, longest, changes=[(begun, rolling_restart(size, done))])
        while not done and end < MOST_ROLLOUT_SECONDS:
            end += 20.0
            outcome = fleet.run(end)
        values = " | ".join(milliseconds(outcome.between(*span)) for span in ((setup.warm_up, begun), (begun, end)))
        took = f"{done[0] - begun:,.0f}" if done else f"more than {end - begun:,.0f}"
        yield f"| {100 * share:.0f} % | {took} | {values} | {100 * outcome.hit_rate:.1f} % |"


def rolling_restart(size: int, done: list[float], load_seconds: float = 20.0) -> Change:
    """Restarts all replicas, `size` at a time; `done` gets the time of the end."""

    def begin(fleet: Fleet, now: float, first: int = 0) -> None:
        group = range(first, min(first + size, len(fleet.replicas)))
        if not group:
            done.append(now)
            return
        for index in group:
            fleet.drain(index)
        wait(fleet, now, group)

    def wait(fleet: Fleet, now: float, group: range) -> None:
        for index in group:
            if fleet.replicas[index].num_requests:
                fleet.call_later(now + 1.0, lambda fleet, time: wait(fleet, time, group))
                return
        fleet.call_later(now + load_seconds, lambda fleet, time: end(fleet, time, group))

    def end(fleet: Fleet, now: float, group: range) -> None:
        for index in group:
            fleet.start(index, now)
        begin(fleet, now, group.stop)

    return begin


def overload(setup: Setup) -> Iterable[str]:
    """Loads up to and above what the fleet can do, with and without a limit of waiting tokens."""
    yield "| load | limit of waiting tokens per replica | rejected | TTFT p50, ms | p99 | TPOT p50, ms | p99 |"
    yield "|---|---|---|---|---|---|---|"
    for load in (0.8, 1.0, 1.2, 1.5, 2.0):
        for limit in (None, 8000):
            heavier = replace(setup, load=load)
            fleet = heavier.fleet(AWARE, max_waiting_tokens=limit)
            outcome = fleet.run(setup.seconds)
            late = outcome.arrival >= setup.warm_up
            rejected = outcome.num_rejected / max(1, len(fleet.requests))
            yield (
                f"| {load:g} | {limit or 'none'} | {100 * rejected:.1f} % | {milliseconds(outcome.ttft[late])} | "
                f"{milliseconds(outcome.tpot[late])} |"
            )


def autoscaling(setup: Setup) -> Iterable[str]:
    """The rate of conversations grows by half at once; replicas are added when the loads call for it."""
    yield "| a replica starts within | replicas at the end | replica seconds | TTFT p50 after the step, ms | p99 |"
    yield "|---|---|---|---|---|"
    step = setup.seconds / 3
    workload = replace(setup.workload, step_at=step, step_factor=1.5)
    for seconds in (0.0, 15.0, 60.0, 180.0):
        fleet = setup.fleet(AWARE, workload, changes=[(5.0, autoscaler(seconds))])
        outcome = fleet.run(setup.seconds)
        yield (
            f"| {seconds:g} s | {len(fleet.replicas)} | {outcome.replica_seconds:,.0f} | "
            f"{milliseconds(outcome.between(step, setup.seconds))} |"
        )


def autoscaler(start_seconds: float, period: float = 5.0, target: float = 2000.0) -> Change:
    """Adds replicas while more than `target` prompt tokens wait per replica: as many as would bring it back, at most a
    tenth of the fleet at a time."""
    starting = 0

    def look(fleet: Fleet, now: float) -> None:
        nonlocal starting
        count = int(fleet.view.accepts.sum())
        waiting = float(fleet.view.waiting.sum())
        wanted = min(int(count * (waiting / (target * count) - 1)), count // 10 + 1) - starting
        for _ in range(max(0, wanted)):
            starting += 1
            fleet.call_later(now + start_seconds, add)
        fleet.call_later(now + period, look)

    def add(fleet: Fleet, now: float) -> None:
        nonlocal starting
        starting -= 1
        fleet.add_replica(now)

    return look


def disaggregation(setup: Setup) -> Iterable[str]:
    """The same requests on replicas that do both, and divided: some compute prompts, the others generate."""
    fleet = setup.fleet(AWARE)
    fleet.run(setup.seconds)
    requests = fleet.requests
    yield "| replicas | TTFT p50, ms | p99 | TPOT p50, ms | p99 |"
    yield "|---|---|---|---|---|"
    for chunk in (512, 2048, 8192):
        times = replace(setup.times, max_prompt_tokens=chunk)
        outcome = replay(setup, times, requests, setup.num_replicas)
        late = outcome.arrival >= setup.warm_up
        ttft, tpot = milliseconds(outcome.ttft[late]), milliseconds(outcome.tpot[late])
        yield f"| {setup.num_replicas} for both, steps of up to {chunk:,} prompt tokens | {ttft} | {tpot} |"
    for share in (0.5, 0.6, 0.7):
        first = round(setup.num_replicas * share)
        prompts = replay(setup, setup.times, [replace(r, output_tokens=1) for r in requests], first)
        transfer = replace(setup.times, prompt_token=setup.times.load_token, max_prompt_tokens=10**6)
        sequences = replay(setup, transfer, requests, setup.num_replicas - first)
        late_prompts, late = prompts.arrival >= setup.warm_up, sequences.arrival >= setup.warm_up
        ttft = prompts.ttft[late_prompts] + np.median(sequences.ttft[late])
        yield (
            f"| {first} for prompts, {setup.num_replicas - first} for sequences | {milliseconds(ttft)} | "
            f"{milliseconds(sequences.tpot[late])} |"
        )


def replay(setup: Setup, times: StepTimes, requests: Sequence[Request], count: int) -> Outcome:
    """The requests at their times on `count` replicas with least-tokens routing and without caches."""
    fleet = Fleet(
        times, count, POLICIES[BLIND](count), Replay(requests), setup.workload.num_system_prompts, uses_cache=False
    )
    return fleet.run(setup.seconds)


def calibration(setup: Setup) -> Iterable[str]:
    """Measured steps, and measured runs of many requests, beside what the simulation says of them.

    The step times are fitted to the other measured steps, without the one that they are compared with.
    """
    yield "| what | measured, tokens per second | simulated | simulated / measured |"
    yield "|---|---|---|---|"
    for i, (sequences, kv_tokens, prompt_tokens, seconds) in enumerate(setup.measured):
        times = fit([*setup.measured[:i], *setup.measured[i + 1 :]])
        simulated = times.decode_step(int(sequences), kv_tokens) + times.prompt_token * prompt_tokens
        what = f"step of {sequences:.0f} sequences with {kv_tokens:,.0f} tokens in the KV cache"
        if prompt_tokens:
            what = f"prompt of {prompt_tokens:,.0f} tokens"
        yield compare(what, sequences + prompt_tokens, seconds, simulated)
    for count, prompt, output, seconds in setup.measured_runs:
        simulated = makespan(setup.times, int(count), int(prompt), int(output))
        what = f"{count} requests at once, prompts of {prompt} tokens, {output} output tokens"
        yield compare(what, count * output, seconds, simulated)


def compare(what: str, num_tokens: float, measured: float, simulated: float) -> str:
    """A row of throughputs, of a number of tokens and two numbers of seconds."""
    return f"| {what} | {num_tokens / measured:,.0f} | {num_tokens / simulated:,.0f} | {measured / simulated:.2f} |"


def makespan(times: StepTimes, count: int, prompt: int, output: int) -> float:
    """Seconds until equal requests that come at once have ended on one replica without a cache."""
    requests = [Request(0.0, i, 0, 0, 0, prompt, output, 0) for i in range(count)]
    fleet = Fleet(times, 1, POLICIES[BLIND](1), Replay(requests), 1, uses_cache=False)
    outcome = fleet.run(1e6)
    return float(np.max(outcome.ttft + np.nan_to_num(outcome.tpot) * (output - 1)))


NUM_STEPS = 128
"""Decode steps of a measurement."""


def measure(path: Path, model: str) -> StepTimes:
    """Measures steps of an engine on this machine, the fastest of some equal ones, and writes them to `path`."""
    from mvllm import LLM, SamplingParams
    from mvllm.inputs import TokensPrompt

    rows = []
    with LLM(model=model, enable_prefix_caching=False) as llm:
        rng = np.random.default_rng(0)

        def seconds(num_sequences: int, num_prompt: int, num_output: int) -> float:
            prompts = [
                TokensPrompt(prompt_token_ids=rng.integers(5, 200, num_prompt).tolist()) for _ in range(num_sequences)
            ]
            params = SamplingParams(max_tokens=num_output, temperature=0, ignore_eos=True, detokenize=False)
            best = float("inf")
            for _ in range(5):
                begun = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                best = min(best, time.perf_counter() - begun)
            return best

        seconds(1, 16, 2)  # warm-up
        for count in (1, 4, 16, 64):
            for length in (16, 256):
                prefill = seconds(count, length, 1)
                # Many steps: the difference of two prompts' times is a large part of that of few steps.
                steps = seconds(count, length, 1 + NUM_STEPS) - prefill
                rows.append((count, count * (length + NUM_STEPS / 2 + 0.5), 0, max(1e-6, steps / NUM_STEPS)))
                if count == 1:
                    rows.append((0, 0, length, prefill))
        rows += [(0, 0, length, seconds(1, length, 1)) for length in (64, 768)]
        runs = [(count, 128, 64, seconds(count, 128, 64)) for count in (1, 8, 32, 128)]
    columns = {"columns": "sequences, kv tokens, prompt tokens, s", "run_columns": "requests, prompt, output, s"}
    path.write_text(json.dumps({"model": model, **columns, "steps": rows, "runs": runs}))
    return fit(rows)


SCENARIOS: dict[str, Callable[[Setup], Iterable[str]]] = {
    function.__name__: function
    for function in (policies, cells, routers, failures, restarts, overload, autoscaling, disaggregation, calibration)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--load", type=float, default=1.0, help="factor of the rate of conversations")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=Path, help="measured step times, from --measure")
    parser.add_argument("--measure", type=Path, help="measure step times and write them to this file")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="for the scenario policies; all by default")
    parser.add_argument("--model", default="demo", help="for --measure")
    args = parser.parse_args()
    if unknown := [name for name in args.scenarios if name not in SCENARIOS]:
        parser.error(f"there is no scenario {unknown[0]!r}: choose from {', '.join(SCENARIOS)}")
    if args.measure is not None:
        print(measure(args.measure, args.model))
    times = ACCELERATOR if args.steps is None else read(args.steps)
    found = {"steps": [], "runs": []} if args.steps is None else json.loads(args.steps.read_text())
    if "calibration" in args.scenarios and not found["steps"]:
        parser.error("calibration needs --steps FILE")
    measured, runs = (tuple(map(tuple, found.get(name, ()))) for name in ("steps", "runs"))
    chosen = tuple(args.policy or POLICIES)
    setup = Setup(times, args.replicas, args.load, args.seconds, args.seed, chosen, measured, runs)
    for name in args.scenarios:
        begun = time.perf_counter()
        print(f"\n{name}: {SCENARIOS[name].__doc__}\n")
        for line in SCENARIOS[name](setup):
            print(line, flush=True)
        print(f"\n({time.perf_counter() - begun:.0f} s of wall time)")


if __name__ == "__main__":
    main()
