"""Benchmarks mvllm on this machine's CPU against other installed engines and the machine's limits.

    python3 ci/dev.py bench cpu --peers FOLDER [--models FOLDER] [--workload offline,single] [--precision bf16,int8]

The folder of `--peers` holds one virtual environment per engine (vLLM's CPU build, OpenVINO GenAI, llama-cpp-python,
mlx-lm, transformers), under any names. Without it, mvllm is compared with the limits only. Engines of one precision
stay loaded and run alternately. Each run waits until the machine is idle; the read bandwidth and the matrix-product
rates are measured before and after it. The table shows these shares of the run time:

    bandwidth bound   bytes that must be read / read bandwidth
    GEMM bound        operations / rate of matrix products
    floor             the larger of the two in each phase (prompts, then tokens)

With `--gguf`, mvllm is compared with llama.cpp on GGUF files instead, see `gguf_rows.py`:

    python3 ci/dev.py bench cpu --peers FOLDER --gguf [made published FILE ...] [--workload single,start]

Every run is also a line of JSON in --out; `--table FILE` prints the table from such files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mvllm.errors import ModelError
from tests.helpers.published import FILES
from tests.perf.cpu_bench.engines import PRECISIONS, Engine, installed_peers, on_platform, our_engines, with_settings
from tests.perf.cpu_bench.gguf_rows import GGUF_WORKLOADS, MADE, NAMES, FileBenchmark, files_of, render_files
from tests.perf.cpu_bench.limits import ModelSize
from tests.perf.cpu_bench.machine import Probe, describe, wait_until_idle
from tests.perf.cpu_bench.mixed import Answer, MixedLoad, Server, arrivals_of, drive, summary
from tests.perf.cpu_bench.models import hf_model, model_for
from tests.perf.cpu_bench.session import Session
from tests.perf.cpu_bench.table import Record, render
from tests.perf.cpu_bench.workloads import MIXED, START, WARM_UP, WORKLOADS, in_turn


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="ci/dev.py bench cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(tempfile.gettempdir())
    every = [*WORKLOADS, MIXED, START]
    parser.add_argument(
        "--workload",
        type=_among(every),
        help=f"of {','.join(every)}; default: all but {START}; with --gguf {','.join(GGUF_WORKLOADS)}",
    )
    parser.add_argument(
        "--gguf",
        nargs="*",
        metavar="FILE",
        help=f"GGUF files, or names among {','.join((*NAMES, *MADE, *FILES))}; default: {' '.join(NAMES)}",
    )
    parser.add_argument("--dtype", default="bfloat16", help="compute dtype of mvllm with --gguf (bfloat16)")
    parser.add_argument(
        "--precision",
        type=_among(PRECISIONS),
        default=list(PRECISIONS),
        help=f"of {','.join(PRECISIONS)}; default: all",
    )
    parser.add_argument("--engine", type=_words, help="parts of engines' names, such as mvllm,vllm; default: all")
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=JSON,..", help="another row of mvllm, with these settings"
    )
    parser.add_argument(
        "--on", type=_words, default=[], metavar="PLATFORM,..", help="more rows of mvllm, on these platforms"
    )
    parser.add_argument("--runs", type=int, default=3, help="of each engine on each workload (default 3)")
    parser.add_argument("--idle-limit", type=float, default=120.0, help="seconds to wait for an idle machine (120)")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    parser.add_argument("--model", default="S", choices=["S", "M"])
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 10**6, help="of the prompts; default: another each time"
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=os.environ.get("MVLLM_BENCH_MODELS", here / "mvllm-cpu-bench"),
        help="folder of models",
    )
    parser.add_argument(
        "--peers", type=Path, default=os.environ.get("MVLLM_BENCH_PEERS"), help="folder of virtual environments"
    )
    parser.add_argument("--out", type=Path, help="file that gets a JSON line per run (default: among the models)")
    parser.add_argument("--table", type=Path, nargs="+", help="measure nothing: print the table of such files")
    args = parser.parse_args(argv)
    not_there = {START} if args.gguf is None else {MIXED}
    if args.workload is None:
        args.workload = [*WORKLOADS, MIXED] if args.gguf is None else list(GGUF_WORKLOADS)
    elif wrong := sorted(not_there & set(args.workload)):
        parser.error(f"workload {wrong[0]!r} is measured only {'with' if args.gguf is None else 'without'} --gguf")
    return args


def chosen(engines: Sequence[Engine], names: Sequence[str] | None) -> list[Engine]:
    """The engines whose names contain one of `names`."""
    if names is None:
        return list(engines)
    return [each for each in engines if any(name.lower() in each.name.lower() for name in names)]


def main(argv: Sequence[str] | None = None) -> None:
    args = options(argv)
    if args.table:
        lines = [line for file in args.table for line in file.read_text().splitlines()]
        records = [Record.from_json(json.loads(line)) for line in lines]
        if args.gguf is not None:
            print(render_files(records))
            return
        print(render(records, ModelSize.of(hf_model(args.models, args.model))))
        return
    if args.gguf is not None:
        gguf_files(args)
        return
    ours = our_engines(args.threads)
    default = ours[:]
    ours += [with_settings(ours[0], settings) for settings in args.also]
    ours += [row for platform in args.on for row in on_platform(default, platform)]
    engines = chosen([*ours, *installed_peers(args.peers)], args.engine)
    out, keep, records, logs = _outputs(args)
    hf_model(args.models, args.model)
    with Probe(args.models, args.threads) as probe:
        print(f"{describe()}; {args.threads} threads; model {args.model}; prompts of seed {args.seed}", flush=True)
        if probe.note:
            print(probe.note, flush=True)
        session = Session(
            args.models,
            args.model,
            probe,
            threads=args.threads,
            logs=logs,
            keep=keep,
            seed=args.seed,
            idle_limit=args.idle_limit,
        )
        for precision in args.precision:
            group = [engine for engine in engines if engine.precision == precision]
            if workloads := [WORKLOADS[name] for name in args.workload if name in WORKLOADS]:
                session.run(group, workloads, args.runs)
            if MIXED in args.workload:
                mixed(group, args, probe, session.size, logs, keep)
    print(f"\n{render(records, session.size)}\n\nruns: {out}")


def gguf_files(args: argparse.Namespace) -> None:
    """mvllm beside llama.cpp on the same files."""
    peers = [peer for peer in installed_peers(args.peers) if peer.runner.name == "run_llama_cpp.py"]
    peer = peers[0] if peers else None
    out, keep, records, logs = _outputs(args)
    try:
        files = files_of(args.gguf, args.models, peer)
    except subprocess.CalledProcessError as e:
        raise SystemExit(f"error: a file could not be made: {e.stdout}") from e
    except (ValueError, ModelError) as e:
        raise SystemExit(f"error: {e}") from e
    with Probe(args.models, args.threads) as probe:
        print(f"{describe()}; {args.threads} threads; dtype {args.dtype}; prompts of seed {args.seed}", flush=True)
        if peer is None:
            print("no llama.cpp among --peers: mvllm alone", flush=True)
        if probe.note:
            print(probe.note, flush=True)
        benchmark = FileBenchmark(
            peer,
            dtype=args.dtype,
            probe=probe,
            threads=args.threads,
            logs=logs,
            keep=keep,
            seed=args.seed,
            idle_limit=args.idle_limit,
        )
        for file in files:
            benchmark.run(file, args.workload, args.runs)
    print(f"\n{render_files(records)}\n\nruns: {out}")


def _outputs(args: argparse.Namespace) -> tuple[Path, Callable[[Record], None], list[Record], Path]:
    """The file of the runs, what keeps a record in it, the kept records, and the folder for engines' output."""
    out = args.out or args.models / f"runs-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    logs = args.models / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []

    def keep(record: Record) -> None:
        records.append(record)
        with out.open("a") as lines:
            lines.write(json.dumps(record.to_json()) + "\n")
        took = record.note if record.seconds is None else f"{record.workload} {record.seconds:.3f} s"
        print(f"  {record.engine} ({record.precision}) {took}", flush=True)

    return out, keep, records, logs


def mixed(
    engines: Sequence[Engine],
    args: argparse.Namespace,
    probe: Probe,
    size: ModelSize,
    logs: Path,
    keep: Callable[[Record], None],
) -> None:
    """The mixed load: all engines' servers stay up and are drive_server in turn, `--runs` times each."""

    def not_run(engine: Engine, note: str) -> None:
        keep(Record(MIXED, engine.precision, engine.name, engine.ours, note=note))

    def drive_server(server: Server, load: MixedLoad, run: int) -> tuple[float, list[Answer]]:
        return asyncio.run(drive(server.url, arrivals_of(load, run, size.vocab, args.seed)))

    with contextlib.ExitStack() as stack:
        alive: dict[str, Server] = {}
        for engine in engines:
            if engine.server is None:
                not_run(engine, "measured as mvllm" if engine.ours else "no server among its packages")
                continue
            model = model_for(engine, args.models, args.model)
            log = logs / f"{engine.name}-{engine.precision}-server.log".replace(" ", "-")
            try:
                server = stack.enter_context(Server(engine, model, threads=args.threads, log=log))
                drive_server(server, MixedLoad(requests=8), WARM_UP)
            except (RuntimeError, OSError, TimeoutError) as e:
                print(e, flush=True)
                not_run(engine, str(e).splitlines()[0])
                continue
            alive[engine.name] = server
        for run, name in in_turn(list(alive), args.runs):
            if name not in alive:
                continue
            engine = alive[name].engine
            idle, before = wait_until_idle(args.idle_limit), probe.rates()
            try:
                seconds, answers = drive_server(alive[name], MixedLoad(), run)
            except (RuntimeError, OSError, TimeoutError) as e:
                print(e, flush=True)
                not_run(engine, str(e).splitlines()[0])
                del alive[name]
                continue
            keep(
                Record(
                    MIXED,
                    engine.precision,
                    engine.name,
                    engine.ours,
                    run=run,
                    seconds=seconds,
                    before=before,
                    after=probe.rates(),
                    weights=engine.weights,
                    idle=idle,
                    more=summary(answers),
                )
            )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _among(names: Sequence[str]):
    def parse(text: str) -> list[str]:
        words = _words(text)
        unknown = [word for word in words if word not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return words

    return parse


if __name__ == "__main__":
    main()
