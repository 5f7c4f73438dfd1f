"""Probes in a process of their own, so that a probe that crashes or hangs ends neither this process nor other probes.

One child process runs all of them in order. If it ends in one, another child runs the rest:

    this process ──names and functions──> python -m mvllm.platform.isolated_probes
                 <── a line before each probe, and one with its result or exception ──
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

from mvllm.platform.spec import DeviceInfo, ProbeResult

TIMEOUT_SECONDS = 60.0
"""For each probe, from its start to its result, and for the start of the child process."""


@dataclass(frozen=True)
class ProbeAnswer:
    """The outcome of one probe.

    Attributes:
        result: Its result; None without one.
        failure: How its process ended, in a sentence; empty if it did not end in the probe.
        error: Type, text and traceback of the exception that it raised; None without one.
        seconds: Its duration.
    """

    result: ProbeResult | None = None
    failure: str = ""
    error: tuple[str, str, str] | None = None
    seconds: float = 0.0


def run_isolated(probes: Mapping[str, str], run: str) -> dict[str, ProbeAnswer]:
    """Runs probes in child processes.

    Args:
        probes: `package.module:function` by the platform's name.
        run: `package.module:function` that runs a probe, given as a string, and checks its result.
    """
    answers: dict[str, ProbeAnswer] = {}
    while len(answers) < len(probes):
        rest = {name: probe for name, probe in probes.items() if name not in answers}
        answers.update(_run_until_crash(rest, run))
    return answers


def _run_until_crash(probes: Mapping[str, str], run: str) -> dict[str, ProbeAnswer]:
    """The answers up to the first probe that ends its process, with that one."""
    receive, send = os.pipe()
    answers: dict[str, ProbeAnswer] = {}
    with tempfile.TemporaryFile() as output, os.fdopen(receive, "rb", buffering=0) as pipe:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps({"fd": send, "run": run, "probes": dict(probes)})],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[send],
        )
        os.close(send)
        try:
            for name in probes:
                started = time.monotonic()
                line = _read_line(pipe.fileno(), started + TIMEOUT_SECONDS)
                if not line:
                    answers[name] = ProbeAnswer(
                        failure=_end(child, output, is_late=line is None), seconds=time.monotonic() - started
                    )
                    break
                answers[name] = _from_data(json.loads(line))
        finally:
            child.kill()
            child.wait()
    return answers


def _read_line(fd: int, deadline: float) -> bytes | None:
    """The next line; empty at the end of the pipe; None at the deadline."""
    found = b""
    while not found.endswith(b"\n"):
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        piece = os.read(fd, 1)  # bytes after the line belong to the next call
        if not piece:
            return b""
        found += piece
    return found


def _end(child: subprocess.Popen[bytes], output: IO[bytes], *, is_late: bool) -> str:
    """How the process of a probe ended, and the last line that it printed."""
    if is_late:
        how = f"the probe did not answer within {TIMEOUT_SECONDS:g} s"
    else:
        code = child.wait()
        how = f"the probe ended its process by signal {-code} ({signal.Signals(-code).name})" if code < 0 else ""
        how = how or f"the probe ended its process with exit status {code}"
    output.seek(0)
    lines = output.read()[-2000:].decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return how + (f"; it printed last: {last}" if last else "")


def _from_data(data: dict[str, Any]) -> ProbeAnswer:
    result = data.pop("result")
    if result is not None:
        result = ProbeResult(**{**result, "devices": tuple(DeviceInfo(**each) for each in result["devices"])})
    error = data.pop("error")
    return ProbeAnswer(result=result, error=None if error is None else tuple(error), **data)


def _serve(fd: int, run: Callable[[str], ProbeResult], probes: Mapping[str, str]) -> None:
    """In the child: runs the probes and writes a line for each."""
    for probe in probes.values():
        started = time.perf_counter()
        try:
            answer = ProbeAnswer(run(probe))
        except BaseException as e:  # noqa: BLE001  (a plugin may raise anything, SystemExit included)
            answer = ProbeAnswer(error=(type(e).__name__, str(e), traceback.format_exc()))
        data = {**asdict(answer), "seconds": time.perf_counter() - started}
        os.write(fd, json.dumps(data).encode() + b"\n")


def main(job: dict[str, Any]) -> None:
    """The child's program. It ends without exit handlers, which a library could have registered."""
    from mvllm.platform.discovery import load_attribute

    _serve(job["fd"], load_attribute(job["run"]), job["probes"])
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
