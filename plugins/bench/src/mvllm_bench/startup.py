"""Startup benchmark: seconds from the start of a process to the engine's first token.

parent   ──start──┐                                             ┌──reads──> times
child             └─ Python ─ imports ─ LLM(...) ─ first token ─┘
                  0 s      `python`   `import`  `engine`       `first_token`
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mvllm.extension_api import ConfigError, MvllmError
from mvllm.extension_api.cli import EngineArgs
from mvllm_bench.report import standard_percentiles

_LONGEST_SECONDS = 3600


def measure_startup(args: EngineArgs, num_iters: int, *, on_done: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Starts an engine `num_iters` times, each time in a new process that ends after its first token.

    Args:
        args: The engine's settings.
        num_iters: Number of starts.
        on_done: Called after each start.

    Raises:
        MvllmError: An engine did not start; the message has the last lines of its output.
    """
    if num_iters < 1:
        raise ConfigError(f"num_iters is {num_iters}; it must be at least 1.")
    runs = []
    for _ in range(num_iters):
        runs.append(measure_one_startup(args))
        on_done()
    times = [run["startup"] for run in runs]
    first = [run["first_token"] for run in runs]
    return {
        "avg_startup_time": sum(times) / len(times),
        "startup_times": times,
        "startup_percentiles": standard_percentiles(times),
        "avg_first_token_time": sum(first) / len(first),
        "first_token_times": first,
        "first_token_percentiles": standard_percentiles(first),
        "phases": [run["phases"] for run in runs],
    }


def measure_one_startup(args: EngineArgs) -> dict[str, Any]:
    """Seconds from the start of a process until its engine was ready (`startup`) and had a token (`first_token`).

    `phases` has the parts: the interpreter, imports, and the phases that the engine reports.
    """
    settings = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        begin = time.time()
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(tempfile.TemporaryFile())
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "mvllm_bench.startup", str(result)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=dict(os.environ),
                )
            )
            try:
                process.communicate(json.dumps(settings).encode(), timeout=_LONGEST_SECONDS)
            except BaseException:
                process.terminate()
                raise
            log.seek(0)
            output = log.read().decode("utf-8", "replace")
        if process.returncode != 0 or not result.is_file():
            lines = "\n".join(output.strip().splitlines()[-5:])
            raise MvllmError(f"The engine did not start (exit status {process.returncode}). Its last output:\n{lines}")
        moments: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    phases = {
        "python": moments["python"] - begin,
        "import": moments["imported"] - moments["python"],
        **{f"engine: {name}": seconds for name, seconds in moments["phases"].items()},
    }
    return {"startup": moments["ready"] - begin, "first_token": moments["token"] - begin, "phases": phases}


def _child(result: Path, settings: Mapping[str, Any], python: float) -> None:
    """Main function of the child: starts an engine, generates a token, writes the times to `result`."""
    from mvllm.extension_api.engine import LLM, SamplingParams, TokensPrompt

    imported = time.time()
    try:
        with LLM.from_engine_args(EngineArgs.from_kwargs(**settings)) as llm:
            ready = time.time()
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            llm.generate(TokensPrompt(prompt_token_ids=[1]), params, use_tqdm=False)
            token = time.time()
            phases = llm.llm_engine.start_seconds
    except MvllmError as e:
        sys.exit(f"error: {e}")
    moments = {"python": python, "imported": imported, "ready": ready, "token": token, "phases": phases}
    result.write_text(json.dumps(moments), encoding="utf-8")


if __name__ == "__main__":
    _child(Path(sys.argv[1]), json.loads(sys.stdin.buffer.read()), time.time())
