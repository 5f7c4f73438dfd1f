"""Probes in a process of their own, so that a probe that crashes or hangs ends neither this process nor other probes.

One child process runs all of them in order. If it ends in one, another child runs the rest:

    this process ──names and functions──> python -P -m mvllm.platform.isolated_probes
                 <── a line when it is ready, then one with the result or exception of each probe ──

The child imports from the folders of this process, and never from the current folder unless this process does.
"""

from __future__ import annotations

import contextlib
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
from importlib.metadata import EntryPoint
from typing import IO, Any

from mvllm.logging import get_logger
from mvllm.platform.spec import DeviceInfo, ProbeResult

logger = get_logger(__name__)

TIMEOUT_SECONDS = 60.0
"""For each probe, from its start to its result, and for the start of the child process."""

_EXIT_SECONDS = 10.0  # for a process whose connection has ended


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

    Returns:
        The answers by name. If a child cannot be started, as where `sys.executable` is another program that embeds
        Python or no process may be created, those of the remaining probes are missing.
    """
    answers: dict[str, ProbeAnswer] = {}
    while rest := {name: probe for name, probe in probes.items() if name not in answers}:
        found = _run_until_crash(rest, run)
        if not found:
            break
        answers.update(found)
    return answers


def _run_until_crash(probes: Mapping[str, str], run: str) -> dict[str, ProbeAnswer]:
    """The answers up to the first probe that ends its process, with that one; none if no child starts."""
    if not sys.executable or getattr(sys, "frozen", False):  # that would start this program again
        return {}
    answers: dict[str, ProbeAnswer] = {}
    with contextlib.ExitStack() as stack:
        try:
            output = stack.enter_context(tempfile.TemporaryFile())
            receive, send = os.pipe()
            pipe = stack.enter_context(os.fdopen(receive, "rb", buffering=0))
            with os.fdopen(send, "wb", buffering=0):  # the child has its own
                child = _start(send, output, {"run": run, "probes": dict(probes)})
        except OSError as e:
            logger.warning("Probes of platforms run in this process, because no other can be started: %s.", e)
            return {}
        try:
            line = read_line(pipe.fileno(), time.monotonic() + TIMEOUT_SECONDS)
            if not line:
                how = _end(child, output, is_late=line is None)
                logger.warning("Probes of platforms run in this process, because a child %s.", how)
                return {}
            for name in probes:
                started = time.monotonic()
                line = read_line(pipe.fileno(), started + TIMEOUT_SECONDS)
                if not line:
                    answers[name] = ProbeAnswer(
                        failure=f"the probe {_end(child, output, is_late=line is None)}",
                        seconds=time.monotonic() - started,
                    )
                    break
                answers[name] = _from_data(json.loads(line))
        finally:
            child.kill()
            child.wait()
    return answers


def _start(fd: int, output: IO[bytes], job: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Starts a child that writes to `fd`."""
    job = {**job, "fd": fd, "python_path": os.environ.get("PYTHONPATH")}
    folders = [path or os.curdir for path in sys.path if isinstance(path, str)]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, json.dumps(job)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[fd],
    )


def read_line(fd: int, deadline: float) -> bytes | None:
    """The next line; empty at the end of the pipe; None at the deadline."""
    found = b""
    poll = select.poll()  # select() refuses descriptors from 1024 on
    poll.register(fd, select.POLLIN)
    while not found.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        piece = os.read(fd, 1)  # bytes after the line belong to the next call
        if not piece:
            return b""
        found += piece
    return found


def _end(child: subprocess.Popen[bytes], output: IO[bytes], *, is_late: bool) -> str:
    """How a process that has not answered ended, and the last line that it printed."""
    how = f"did not answer within {TIMEOUT_SECONDS:g} s"
    if not is_late:
        try:
            code = child.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            how = "closed the connection to this process"
        else:
            name = f" ({signal.Signals(-code).name})" if -code in set(signal.Signals) else ""
            how = f"ended its process {f'by signal {-code}{name}' if code < 0 else f'with exit status {code}'}"
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
        os.write(fd, json.dumps(data, default=_plain).encode() + b"\n")


def _plain(value: Any) -> Any:
    """A number or text for a value that JSON does not have, such as a NumPy integer or a version object."""
    return int(value) if hasattr(value, "__index__") else str(value)


def main(job: dict[str, Any]) -> None:
    """The child's program. It ends without exit handlers, which a library could have registered."""
    os.set_inheritable(job["fd"], False)  # a program that a probe starts must not keep the connection open
    os.environ.pop("PYTHONPATH")
    if job["python_path"] is not None:  # programs that a probe starts may be of another Python
        os.environ["PYTHONPATH"] = job["python_path"]
    os.write(job["fd"], b"\n")
    _serve(job["fd"], EntryPoint("run", job["run"], "").load(), job["probes"])
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
