"""Latencies through the HTTP server: `mvllm bench serve` against `mvllm serve`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gpu.result_log import FAILED, MEASURED, ResultLog, Row, one_line
from tests.gpu.settings import Settings

if TYPE_CHECKING:
    from tests.gpu.bench import Plan

FIGURES = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms", "mean_tpot_ms")
MOST_SECONDS = 120.0


def measure_serving(
    name: str, folder: Path, item: str, plan: Plan, settings: Settings, result_log: ResultLog, part: str = "bench"
) -> None:
    """A row of `part` for each rate at which requests come, by a Poisson process."""
    from tests.gpu.bench import engine_arguments
    from tests.helpers.server import ServerProcess

    arguments = []
    for option, value in engine_arguments(name, settings, plan).items():
        text = option.replace("_", "-")
        arguments += [f"--no-{text}"] if value is False else [f"--{text}", str(value)]
    with ServerProcess(settings.out / "logs", str(folder), "--port", "0", *arguments) as server:
        server.wait_ready()
        for rate in plan.rates:
            result_log.add(_measured(part, name, folder, item, rate, server.url, plan, settings))


def _measured(
    part: str, name: str, folder: Path, item: str, rate: float, url: str, plan: Plan, settings: Settings
) -> Row:
    result = settings.out / f"serving-{name}-{rate:g}.json"
    input_len, output_len = plan.served_lengths
    options = {
        "--base-url": url,
        "--tokenizer": str(folder),
        "--num-prompts": str(plan.served),
        "--input-len": str(input_len),
        "--output-len": str(output_len),
        "--request-rate": str(rate),
        "--num-warmups": "2",
        "--result-filename": result.name,
        "--result-dir": str(settings.out),
    }
    command = [sys.executable, "-m", "mvllm.entrypoints.cli.main", "bench", "serve"]
    for option, value in options.items():
        command += [option, value]
    title = f"{name}: server, {rate:g} requests/s"
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS)
    if done.returncode or not result.exists():
        note = one_line(done.stderr[-400:])
        return Row(part, item, title, FAILED, note=note)
    found = json.loads(result.read_text().splitlines()[-1])
    figures = {"completed": found["completed"], **{figure: found[figure] for figure in FIGURES}}
    status = FAILED if found["failed"] else MEASURED
    note = f"{input_len} tokens in, {output_len} out" + (f"; {found['failed']} requests failed" * (found["failed"] > 0))
    return Row(part, item, title, status, figures, note)
