"""Traces host and device in decode steps with torch's profiler.

    host     ──submit step N──│──submit N + 1──│─ ─ waits ─ ─│
    device      │▆▆▆▆▆▆▆▆▆▆▆▆▆│ gap │▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆│

A gap is time in which the device has nothing to do, between the first and the last thing that it does in the trace.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.settings import Settings

if TYPE_CHECKING:
    from mvllm import LLM
    from tests.gpu.bench import Plan
    from tests.gpu.models import Size

DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
LONG_GAP = 50.0  # microseconds
TRACED_STEPS = 24
WARM_STEPS = 2
"""Steps at the beginning of a trace that are left out: the profiler slows them down."""
BEGIN = "begin of the measured steps"


@dataclass(frozen=True)
class Timeline:
    """What a trace says.

    Attributes:
        busy: Microseconds in which the device did something.
        gaps: Microseconds between, each.
        waits: Microseconds in which the host waited for the device.
        launches: Calls that submit something to the device.
    """

    busy: float
    gaps: tuple[float, ...]
    waits: float
    launches: int


def read_events(events: Iterable[dict[str, Any]]) -> Timeline:
    """Of the events of a trace in Chrome's format."""
    device, waits, launches = [], 0.0, 0
    for event in events:
        kind, name = str(event.get("cat", "")), str(event.get("name", ""))
        if event.get("ph") != "X":
            continue
        if kind in DEVICE_KINDS:
            device.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
        elif kind.endswith(("_runtime", "_driver")):
            waits += float(event["dur"]) if "ynchronize" in name else 0.0
            launches += "aunch" in name
    busy, gaps = merge(sorted(device))
    return Timeline(busy, tuple(gaps), waits, launches)


def longest_kernels(events: Iterable[dict[str, Any]], most: int = 15) -> list[tuple[str, int, float]]:
    """Name, launches and total microseconds of the kernels that take most time, the longest first."""
    found: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in DEVICE_KINDS:
            launches, total = found.get(str(event["name"]), (0, 0.0))
            found[str(event["name"])] = launches + 1, total + float(event["dur"])
    ranked = sorted(found.items(), key=lambda entry: -entry[1][1])[:most]
    return [(name, launches, total) for name, (launches, total) in ranked]


def kernel_table(kernels: Sequence[tuple[str, int, float]], steps: int) -> str:
    """A Markdown table of `longest_kernels` of a trace of `steps` steps."""
    lines = ["| kernel | launches a step | µs a launch | µs a step |", "| --- | --- | --- | --- |"]
    for name, launches, total in kernels:
        short = name if len(name) <= 90 else f"{name[:87]}..."
        lines.append(f"| `{short}` | {launches / steps:.1f} | {total / launches:.1f} | {total / steps:.1f} |")
    return "\n".join(lines) + "\n"


def merge(spans: Sequence[tuple[float, float]]) -> tuple[float, list[float]]:
    """Length of the union of spans that are sorted by their beginnings, and the gaps in it."""
    busy, gaps, end = 0.0, [], None
    for begin, until in spans:
        if end is None or begin >= end:
            if end is not None and begin > end:
                gaps.append(begin - end)
            busy, end = busy + until - begin, until
        elif until > end:
            busy, end = busy + until - end, until
    return busy, gaps


def trace_steps(
    llm: LLM, name: str, batch: int, plan: Plan, size: Size, settings: Settings
) -> tuple[dict[str, float], str]:
    """Traces decode steps of `batch` requests, and times as many without the profiler: figures, and a note."""
    from tests.gpu.bench import decoding_steps

    count = plan.steps if settings.quick else TRACED_STEPS
    # First the cost of steps for the calling thread without the profiler.
    walls, own = [], []
    wall, used = 0.0, 0.0
    for _ in decoding_steps(llm, batch, plan.context, count + 1, size.vocab):
        now, now_used = time.perf_counter(), time.thread_time()
        if wall:
            walls.append(now - wall)
            own.append(now_used - used)
        wall, used = now, now_used
    path = settings.out / f"trace-{name}-{batch}.json.gz"
    steps = decoding_steps(llm, batch, plan.context, count + WARM_STEPS + 1, size.vocab)
    next(steps)
    with _traced(path) as begin:
        for number in range(count + WARM_STEPS):
            if number == WARM_STEPS:
                begin()
            next(steps)
    steps.close()
    events = _events(path)
    timeline = read_events(events)
    (settings.out / f"kernels-{name}-{batch}.md").write_text(kernel_table(longest_kernels(events), count))
    figures: dict[str, float] = {
        "step_ms": statistics.median(walls) * 1e3,
        "caller_cpu_ms": statistics.median(own) * 1e3,
    }
    note = "the trace knows no device: only the host's time is known"
    if timeline.busy:
        span = timeline.busy + sum(timeline.gaps)
        figures |= {
            "device_busy": timeline.busy / span,
            "gaps_over_50us_per_step": sum(gap > LONG_GAP for gap in timeline.gaps) / count,
            "longest_gap_us": max(timeline.gaps, default=0.0),
            "launches_per_step": timeline.launches / count,
            "traced_step_ms": span / count / 1e3,
            "traced_host_work_ms": max(0.0, span - timeline.waits) / count / 1e3,
        }
        note = f"{count} steps in {path.name}; the profiler itself takes time of the host"
    return figures, note


def trace_prompt(llm: LLM, name: str, plan: Plan, size: Size, settings: Settings) -> tuple[dict[str, float], str]:
    """Traces two of the longest prompts: figures, and a note."""
    from tests.gpu.bench import prompt_seconds

    length = plan.prompts[-1]
    path = settings.out / f"trace-prompt-{name}.json.gz"
    with _traced(path) as begin:
        begin()
        prompt_seconds(llm, length, size.vocab, rounds=1)
    events = _events(path)
    timeline = read_events(events)
    (settings.out / f"kernels-prompt-{name}.md").write_text(kernel_table(longest_kernels(events), 2))
    if not timeline.busy:
        return {}, "the trace knows no device"
    span = timeline.busy + sum(timeline.gaps)
    return {"device_busy": timeline.busy / span, "longest_gap_us": max(timeline.gaps, default=0.0)}, path.name


@contextmanager
def _traced(path: Path) -> Iterator[Callable[[], None]]:
    """Writes a trace of what happens in this context; from the call of its function on it is part of the results."""
    from torch.profiler import profile, record_function, supported_activities

    def begin() -> None:
        with record_function(BEGIN):
            pass

    with profile(activities=supported_activities(), acc_events=True) as profiler:
        yield begin
    profiler.export_chrome_trace(str(path))


def _events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace after the mark BEGIN."""
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    since = max((float(event["ts"]) for event in events if event.get("name") == BEGIN), default=0.0)
    return [event for event in events if event.get("ph") == "X" and float(event["ts"]) >= since]
