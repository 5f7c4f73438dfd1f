"""Creates the virtual environments of the repository: .venv for ci/dev.py, .venv-tpu for ci/tpu_lane.py.

An environment depends on a few files. Their hash is written to it as the last step; if the hash is unchanged, nothing
has to be done. An environment with the stamp "unfinished" is created again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TAIL = 25  # lines of a failed command's output that fit a screen
TOO_LONG = 124  # the exit status of a command that was ended because its time was over


class StepFailed(Exception):
    """A command failed; the message is complete."""


# --------------------------------------------------------------------------------------------------------- environments


@dataclass(frozen=True)
class Stamp:
    """Hashes of the files from which an environment was created.

    Attributes:
        inputs: Hash of all inputs; "unfinished" in an incomplete environment.
        kernels: Hash of the inputs of the slow part: compiled kernels, or downloads.
        device: Hash of the example device's inputs; empty without a compiler.
    """

    inputs: str
    kernels: str = ""
    device: str = ""


UNFINISHED = Stamp("unfinished")


@dataclass(frozen=True)
class Environment:
    """A virtual environment, which may not exist yet.

    Attributes:
        root: The repository, where commands run.
        folder: The environment's folder.
    """

    root: Path
    folder: Path

    @property
    def bin(self) -> Path:
        """The folder of its commands."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.bin / "python"

    @property
    def stamp(self) -> Path:
        """The file of its stamp. It exists from the start, so that an incomplete environment can be detected."""
        return self.folder / "mvllm-setup.json"

    def read_stamp(self) -> Stamp | None:
        """The stamp; None if it is missing or unreadable."""
        try:
            return Stamp(**json.loads(self.stamp.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write_stamp(self, stamp: Stamp) -> None:
        """Writes the stamp."""
        self.folder.mkdir(exist_ok=True)
        draft = self.stamp.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(stamp)) + "\n")
        draft.replace(self.stamp)

    def hash_of(self, files: Sequence[Path]) -> str:
        """A hash of the files' contents, the repository's path and the Python version."""
        # Editable installs contain the path.
        digest = hashlib.sha256(f"{self.root}\n{sys.version_info[:2]}\n".encode())
        for file in files:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(self.root)}\n{len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()

    def has(self, commands: Sequence[str]) -> bool:
        """Whether these commands exist."""
        return all((self.bin / name).exists() for name in commands)

    def works(self) -> bool:
        """Whether its Python and pip run."""
        return self.python.exists() and self.capture([self.python, "-m", "pip", "--version"])[1] == 0

    def remove(self) -> None:
        """Deletes the environment."""
        if self.folder.is_symlink() or self.folder.is_file():
            self.folder.unlink()
        elif self.folder.exists():
            shutil.rmtree(self.folder)

    def install_pins(self, pins: Path, commands: Sequence[str], titles: tuple[str, str]) -> None:
        """Creates the environment from a file that pins every package; returns at once if it is up to date.

        Args:
            pins: The file.
            commands: Programs that the environment must have.
            titles: Of the two steps.

        Raises:
            StepFailed: A command failed.
        """
        wanted = Stamp(self.hash_of([pins]))
        with only_one():
            if self.read_stamp() == wanted and self.has(commands):
                return
            self.remove()
            self.write_stamp(UNFINISHED)
            steps = Steps(self, total=2)
            steps.run(titles[0], [sys.executable, "-m", "venv", self.folder])
            pip = [self.python, "-m", "pip", "install", "--quiet", "--progress-bar", "off", "--no-deps"]
            steps.run(titles[1], [*pip, "-r", pins])
            self.write_stamp(wanted)

    def variables(self, **extra: str) -> dict[str, str]:
        """Environment variables for child processes: this process's, without those of other installations."""
        leaks = (
            "PYTHONHOME",
            "PYTHONPATH",
            "PYTHONDONTWRITEBYTECODE",  # tests start hundreds of interpreters, which share the compiled files
            "PIP_TARGET",
            "PIP_PREFIX",
            "PIP_USER",
            "PIP_REQUIRE_VIRTUALENV",
            "PIP_CONSTRAINT",
        )
        kept = {name: value for name, value in os.environ.items() if name not in leaks}
        quiet = {
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
            "PYTHONNOUSERSITE": "1",
            "VIRTUAL_ENV": str(self.folder),
        }
        path = {"PATH": os.pathsep.join([str(self.bin), os.environ.get("PATH", os.defpath)])}
        return {**kept, **quiet, **path, **extra}

    def capture(
        self, command: Sequence[str | Path], limit: float | None = None, extra: dict[str, str] | None = None
    ) -> tuple[str, int]:
        """Runs a command.

        Args:
            limit: Timeout in seconds.
            extra: Additional environment variables.

        Returns:
            Its output (stdout and stderr together) and exit status.
        """
        try:
            process = subprocess.run(
                [str(part) for part in command],
                cwd=self.root,
                env=self.variables(**(extra or {})),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=limit,
            )
        except subprocess.TimeoutExpired as error:
            return f"{(error.output or b'').decode(errors='replace')}\nended after {limit:.0f} s", TOO_LONG
        except OSError as error:
            return f"{type(error).__name__}: {error}", 127
        return process.stdout.decode(errors="replace"), process.returncode


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """A lock that prevents two commands from changing environments at the same time."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        yield
        return
    with open(__file__, encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def pinned(name: str, constraints: Path) -> str:
    """Returns the version that a file of constraints pins `name` to.

    Raises:
        StepFailed: The file has no such pin.
    """
    match = re.search(rf"^{re.escape(name)}==(\S+)", constraints.read_text(), re.MULTILINE | re.IGNORECASE)
    if match is None:
        raise StepFailed(f"error: {constraints} pins no version of {name}\n  remedy: add a line `{name}==<version>`")
    return match.group(1)


# ------------------------------------------------------------------------------------------------ steps and failures


@dataclass
class Steps:
    """Prints `[2/4] what ... 12.3 s` for each command, and one screen when one of them fails.

    Attributes:
        environment: The environment in which commands run.
        total: Number of commands.
        ends: Deadline (time.monotonic) of the running command; None for no limit.
    """

    environment: Environment
    total: int
    ends: float | None = None
    done: int = 0

    def run(self, title: str, command: Sequence[str | Path]) -> str:
        """Runs a command without showing its output; returns the output.

        Raises:
            StepFailed: The command could not start, failed, or exceeded the deadline.
        """
        self.done += 1
        label = f"[{self.done}/{self.total}] {title} ..."
        started = time.monotonic()
        limit = None if self.ends is None else max(self.ends - started, 1.0)
        with ticking(label, started):
            output, status = self.environment.capture(command, limit)
        seconds = time.monotonic() - started
        finish(label, f"{seconds:.1f} s" if status == 0 else f"FAILED after {seconds:.1f} s")
        if status != 0:
            raise StepFailed(failure_screen(title, command, status, output))
        return output

    @contextlib.contextmanager
    def timed(self, title: str) -> Iterator[None]:
        """The same line for a step that is not one command."""
        self.done += 1
        label = f"[{self.done}/{self.total}] {title} ..."
        started = time.monotonic()
        result = "FAILED"
        try:
            with ticking(label, started):
                yield
            result = ""
        finally:
            finish(label, f"{result} {time.monotonic() - started:.1f} s".strip())


@contextlib.contextmanager
def ticking(label: str, started: float) -> Iterator[None]:
    """Prints the label, and on a terminal the elapsed seconds."""
    print(label, end="", flush=True)
    if not sys.stdout.isatty():
        yield
        return
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(1.0):
            print(f"\r{label} {time.monotonic() - started:.0f} s", end="", flush=True)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def finish(label: str, result: str) -> None:
    """Ends the line that `ticking` started."""
    print(f"\r{label} {result}" if sys.stdout.isatty() else f" {result}", flush=True)


REMEDIES = (
    (r"ensurepip", "install your system's venv package (Debian, Ubuntu: apt install python3-venv)"),
    (r"No space left on device", "free some disk: an environment takes about 2 GB"),
    (
        r"No matching distribution|ResolutionImpossible|ConnectionError|ConnectTimeout|ReadTimeout|name resolution",
        "pip could not get the pinned version: check the network, pip's settings (pip config list), Python's version",
    ),
    (r"Read-only file system|Permission denied", "make the repository's folder writable for you"),
)


def failure_screen(title: str, command: Sequence[str | Path], status: int, output: str) -> str:
    """The message for a failed command: the command, the end of its output, and a known remedy."""
    lines = output.strip().splitlines()
    shown = lines[-TAIL:]
    left_out = len(lines) - len(shown)
    screen = [
        f"error: {title} failed with exit status {status}",
        f"  command: {shlex.join(str(part) for part in command)}",
        f"  output{f' (last {TAIL} of {len(lines)} lines)' if left_out else ''}:",
        *(f"    {line[:200]}" for line in shown or ["(nothing)"]),
    ]
    remedy = next((text for pattern, text in REMEDIES if re.search(pattern, output)), None)
    if remedy:
        screen.append(f"  remedy: {remedy}")
    return "\n".join(screen)
