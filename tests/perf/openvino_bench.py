"""mvllm on the platform `openvino`, mvllm on `cpu`, and OpenVINO GenAI's own pipeline: same model, prompts and threads.

    python -m tests.perf.openvino_bench --genai ENVIRONMENT/bin/python [--models FOLDER] [--runs 3]

GenAI runs in an environment of its own, which also has optimum-intel to convert the model. The engines stay loaded and
run alternately; each run waits until the machine is idle. Prints the median seconds of each engine, and of the others'
divided by those of mvllm on `openvino`: above 1, mvllm on `openvino` is faster. `--tiny` shrinks the workloads, to try
the script; its figures say nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.perf.cpu_bench.engines import PRECISIONS, Engine, our_engines, peers_with
from tests.perf.cpu_bench.machine import Probe, describe
from tests.perf.cpu_bench.session import Session
from tests.perf.cpu_bench.table import Record
from tests.perf.cpu_bench.workloads import WORKLOADS, Workload

OURS, CPU = "mvllm openvino", "mvllm cpu"
ROWS = ("single", "prefill", "offline", "prefix")


def engines(precision: str, genai: Path | None, threads: int) -> list[Engine]:
    """The engines of a precision, mvllm on `openvino` first."""
    plain = next(each for each in our_engines(threads) if each.name == "mvllm" and each.precision == precision)
    found = [
        replace(plain, name=f"mvllm {platform}", options=(f'platform="{platform}"',), server=None)
        for platform in ("openvino", "cpu")
    ]
    if genai is not None:
        found += [each for each in peers_with({"openvino-genai"}, genai) if each.precision == precision]
    return found


def shrunk(workload: Workload) -> Workload:
    """A few tokens of few requests."""
    return replace(
        workload,
        requests=min(workload.requests, 2),
        shared=min(workload.shared, 64),
        own=min(workload.own, 40),
        output=min(workload.output, 4),
    )


def table(records: Sequence[Record], workloads: Sequence[Workload], names: Sequence[str]) -> str:
    """Medians and ratios of one precision, as Markdown."""
    others = [name for name in names if name != OURS]
    lines = [
        "| workload | " + " | ".join([*(f"{name} s" for name in names), *(f"{name} / ours" for name in others)]) + " |",
        "| --- " * (1 + len(names) + len(others)) + "|",
    ]
    for workload in workloads:
        medians = {name: _median(records, workload.name, name) for name in names}
        ours = medians[OURS]
        cells = ["not measured" if (m := medians[name]) is None else f"{m:.4f}" for name in names]
        cells += ["" if ours is None or (m := medians[name]) is None else f"{m / ours:.2f}" for name in others]
        lines.append(f"| {workload} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _median(records: Sequence[Record], workload: str, engine: str) -> float | None:
    """Median seconds; None if a run failed."""
    seconds = [record.seconds for record in records if (record.workload, record.engine) == (workload, engine)]
    measured = [each for each in seconds if each is not None]
    return statistics.median(measured) if measured and len(measured) == len(seconds) else None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--genai", type=Path, help="Python of an environment with OpenVINO GenAI and optimum-intel")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "mvllm-cpu-bench")
    parser.add_argument("--model", default="S", choices=["S", "M"])
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["bf16"])
    parser.add_argument("--workload", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    parser.add_argument("--idle-limit", type=float, default=120.0, help="seconds to wait for an idle machine (120)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="few tokens of few requests: only to try the script")
    args = parser.parse_args(argv)
    workloads = [shrunk(WORKLOADS[name]) if args.tiny else WORKLOADS[name] for name in args.workload]
    logs = args.models / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []

    def keep(record: Record) -> None:
        records.append(record)
        took = record.note if record.seconds is None else f"{record.seconds:.4f} s"
        print(f"  {record.engine} ({record.precision}) {record.workload} {took}", flush=True)

    with Probe(args.models, args.threads) as probe:
        print(f"{describe()}; {args.threads} threads; model {args.model}; prompts of seed {args.seed}", flush=True)
        settings = {"threads": args.threads, "logs": logs, "seed": args.seed, "idle_limit": args.idle_limit}
        session = Session(args.models, args.model, probe, keep=keep, **settings)
        for precision in args.precision:
            session.run(engines(precision, args.genai, args.threads), workloads, args.runs)
    for precision in args.precision:
        names = [each.name for each in engines(precision, args.genai, args.threads)]
        chosen = [record for record in records if record.precision == precision]
        print(f"\n{precision}, medians of {args.runs} runs\n\n{table(chosen, workloads, names)}")
    if not all(record.idle for record in records if record.seconds is not None):
        print("\nThe machine was not idle before all runs.")


if __name__ == "__main__":
    main()
