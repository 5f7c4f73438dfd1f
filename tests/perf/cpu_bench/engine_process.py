"""An engine in a separate process, kept alive for a whole session so that engines can alternate between runs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.perf.cpu_bench.engines import KV_CACHE_BYTES, Engine

START_LIMIT = 600.0
RUN_LIMIT = 300.0


class EngineFailed(Exception):
    """An engine did not start, exited, or gave a wrong answer; the message contains the end of its output."""


@dataclass(frozen=True)
class Run:
    """One measured run.

    Attributes:
        seconds: From submitting the prompts to receiving all tokens, measured inside the engine's process.
        first: The first token ids of the first request.
    """

    seconds: float
    first: list[int]


class EngineProcess:
    """Starts `engine` on `model` and runs workloads on it.

    Args:
        engine: The engine to start.
        model: The model, in the engine's own format.
        threads: Threads to compute with.
        max_len: Longest sequence.
        log: File for the engine's output.
        kv_bytes: Size of its KV cache, if it takes one.

    Attributes:
        version, says: Its version, and what else it says about itself; set by `start`.
        load_seconds: From the end of its imports until it was loaded, measured inside its process; set by `start`.

    Raises:
        EngineFailed: From `start` and `run`.
    """

    def __init__(
        self,
        engine: Engine,
        model: Path,
        *,
        threads: int,
        max_len: int,
        log: Path,
        kv_bytes: int = KV_CACHE_BYTES,
    ) -> None:
        self.engine, self._log = engine, log
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        command = [
            *(str(part) for part in (engine.python, engine.runner)),
            *("--model", str(model), "--precision", engine.precision, "--threads", str(threads)),
            *("--kv-bytes", str(kv_bytes), "--max-len", str(max_len), "--answers", str(writer)),
            *(f"--option={option}" for option in engine.options),
        ]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                env=engine.environment(threads),
                start_new_session=True,
            )
        os.close(writer)
        self._answers = os.fdopen(reader, "rb", buffering=0)
        self._pending = b""
        self.version = self.says = ""
        self.load_seconds = 0.0

    def start(self) -> str:
        """Waits until the engine is loaded; returns why it is not available, or an empty string."""
        found = self._answer(START_LIMIT)
        if "unavailable" in found:
            return str(found["unavailable"])
        self.version, self.says = str(found["version"]), str(found["says"])
        self.load_seconds = float(found["load_seconds"])
        return ""

    def run(self, prompts: list[list[int]], output: int, shared: int) -> Run:
        """Generates `output` tokens for every prompt."""
        assert self._process.stdin is not None
        line = json.dumps({"prompts": prompts, "output": output, "shared": shared}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError as e:
            raise self._failed("has ended") from e
        found = self._answer(RUN_LIMIT)
        if found["lengths"] != [output] * len(prompts):
            raise self._failed(f"gave {found['lengths'][:4]}... tokens where {output} each were asked for")
        return Run(found["seconds"], found["first"])

    def stop(self) -> None:
        """Stops the engine and all processes that it started."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                self._process.pid, signal.SIGKILL
            )  # the engine has its own process group: this includes workers that it left behind
        self._process.wait()
        self._answers.close()

    def _answer(self, limit: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise self._failed(f"said nothing for {limit:.0f} s")
            piece = os.read(self._answers.fileno(), 1 << 20)
            if not piece:
                raise self._failed("has ended")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def _failed(self, what: str) -> EngineFailed:
        tail = self._log.read_text(errors="replace").strip().splitlines()[-5:]
        return EngineFailed("\n    ".join([f"{self.engine.name} {what}; its output ends ({self._log}):", *tail]))
