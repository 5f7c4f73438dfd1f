"""`mvllm bench sweep`: measures settings and writes the fastest ones to a file for `mvllm serve --config`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mvllm.extension_api import ConfigError, MvllmError
from mvllm.extension_api.cli import __version__, engine_args
from mvllm_bench.datasets import WITH_IMAGES, BenchmarkTokenizer
from mvllm_bench.sweep import Journal, Measured, Start, SweepResult, count_starts, sweep
from mvllm_bench.sweep_settings import (
    candidates,
    config_file,
    default_axes,
    fixed_settings,
    format_result,
    read_axes,
    summary,
)
from mvllm_bench.sweep_trial import EngineTrial, ServerTrial, Workload, check_workload

_DEFAULT_CONCURRENCY = 64


def run_sweep(args: argparse.Namespace, limits: Mapping[str, float] | None, ignore_eos: bool) -> int:
    """Runs the sweep of a parsed command line; returns the exit status.

    Args:
        limits: Limits of --goodput in milliseconds, by metric.
        ignore_eos: Whether outputs have their full length.
    """
    load = {"request_rate": args.request_rate, "max_concurrency": args.max_concurrency}
    server = _measures_server(args, limits is not None or any(value is not None for value in load.values()))
    _check_output(args)
    settings = engine_args(args)
    settings.create_model_config()  # reports invalid settings before the first start
    fixed = fixed_settings(settings)
    concurrency = args.max_concurrency or (_DEFAULT_CONCURRENCY if args.request_rate is None else args.num_prompts)
    axes = read_axes(args.vary, server=server)
    if not axes:
        most = min(args.num_prompts, concurrency) if server else args.num_prompts
        axes = {name: values for name, values in default_axes(most).items() if name not in fixed}
    compared = candidates(axes, settings)
    workload = _workload(args, ignore_eos)
    tokenizer = BenchmarkTokenizer(settings.tokenizer or settings.model)
    check_workload(workload, tokenizer)
    trial: EngineTrial | ServerTrial
    if server:
        rate = args.request_rate or math.inf
        trial = ServerTrial(
            fixed,
            workload,
            args.trial_timeout,
            limits=limits,
            request_rate=rate,
            max_concurrency=concurrency,
            tokenizer=tokenizer,
        )
    else:
        trial = EngineTrial(fixed, workload, args.trial_timeout)
    header = {
        "mvllm": __version__,
        "model and settings": fixed,
        "values": axes,
        "requests": asdict(workload),
        "measure": "server" if server else "engine",
        "load": load,
        "limits": limits,
    }
    path = args.journal or args.output.with_name(f"{args.output.name}.journal")
    if args.overwrite and not args.resume:
        path.unlink(missing_ok=True)
    journal = Journal(path, header, resume=args.resume)
    progress = _Progress(len(compared), journal)
    with _end_on_sigterm():
        try:
            result = sweep(
                compared,
                lambda start: journal.measure(start, trial),
                on_start=progress.on_start,
                on_done=progress.on_done,
            )
        except KeyboardInterrupt:
            print("\nThe same command with --resume continues.", file=sys.stderr)
            raise
    return _report(args, result, fixed, trial.platform, limits)


def _measures_server(args: argparse.Namespace, is_loaded: bool) -> bool:
    if is_loaded and args.measure == "engine":
        raise ConfigError("--goodput, --request-rate and --max-concurrency need --measure server.")
    return is_loaded or args.measure == "server"


def _check_output(args: argparse.Namespace) -> None:
    """Reports an output file that cannot be written before anything is measured."""
    if args.output.exists() and not args.overwrite:
        raise ConfigError(f"{args.output} exists. Name another file with --output, or add --overwrite.")
    if not args.output.absolute().parent.is_dir():
        raise ConfigError(f"The folder of --output {args.output} does not exist. Create it first.")


def _report(
    args: argparse.Namespace,
    result: SweepResult,
    fixed: dict[str, Any],
    platform: str,
    limits: Mapping[str, float] | None,
) -> int:
    """Prints the table and writes the config file; returns the exit status."""
    unit = "tokens/s" if limits is None else "good tokens/s"
    print(format_result(result, unit))
    print("+- is twice the standard error of the mean; the last stage counts for those that reached it.")
    if result.best is None and result.default.error is not None:
        raise MvllmError(f"Nothing could be measured; the default settings failed: {result.default.error}")
    text = summary(result)
    print(text)
    command = shlex.join(["mvllm", *sys.argv[1:]]) if sys.argv[1:2] == ["bench"] else "mvllm bench sweep"
    comments = [
        f"Written by mvllm {__version__} on {datetime.date.today()}: {command}",
        f"Output {unit}: {result.default.score:,.1f} with the default settings.",
        text,
        f"Measured with {os.cpu_count()} CPUs{f', platform {platform}' if platform else ''}.",
    ]
    try:
        args.output.write_text(config_file(fixed, result.chosen, comments), encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"The config file cannot be written to {args.output}: {e.strerror}.") from e
    print(f"Written to {args.output}. Use it with: mvllm serve --config {shlex.quote(str(args.output))}")
    return 0


def _workload(args: argparse.Namespace, ignore_eos: bool) -> Workload:
    if args.dataset_name == WITH_IMAGES:
        raise ConfigError(f"The dataset {WITH_IMAGES!r} is for `mvllm bench serve`.")
    return Workload(
        args.dataset_name,
        args.num_prompts,
        args.seed,
        None if args.dataset_path is None else str(args.dataset_path),
        args.input_len,
        args.output_len,
        args.range_ratio,
        args.prefix_len,
        args.num_prefixes,
        ignore_eos,
    )


class _Progress:
    """Prints a line for each start to stderr, with the time that the others will take."""

    def __init__(self, num_candidates: int, journal: Journal) -> None:
        self._journal = journal
        self._total = count_starts(num_candidates)
        self._num_done = self._num_measured = 0
        self._seconds = 0.0
        self._begin = 0.0
        self._is_recorded = False
        recorded = f", {len(journal)} of them recorded" if len(journal) else ""
        candidates = "1 candidate" if num_candidates == 1 else f"{num_candidates} candidates"
        print(f"{candidates}, up to {self._total} starts{recorded}.", file=sys.stderr)

    def on_start(self, start: Start) -> None:
        """Prints what is measured, without ending the line."""
        self._begin = time.monotonic()
        self._is_recorded = self._journal.is_done(start)
        where = f"[{self._num_done + 1}/{self._total}] stage {start.stage + 1}: {start.candidate.name} ..."
        print(where, end="", file=sys.stderr, flush=True)

    def on_done(self, start: Start, measured: Measured) -> None:
        """Prints the result and the remaining time."""
        self._num_done += 1
        if self._is_recorded:
            suffix = "; recorded"
        else:
            self._num_measured += 1
            self._seconds += time.monotonic() - self._begin
            left = self._seconds / self._num_measured * max(0, self._total - self._num_done)
            suffix = f"; {time.monotonic() - self._begin:.0f} s, about {left / 60:.0f} min left"
        text = f"{measured.score:,.1f} tokens/s" if measured.error is None else f"failed: {measured.error}"
        print(f" {text}{suffix}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _end_on_sigterm() -> Iterator[None]:
    """Within the block SIGTERM raises SystemExit, so that the measured process is ended, too."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
