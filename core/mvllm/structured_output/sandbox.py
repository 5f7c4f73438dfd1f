"""The process that tries grammars out, as the engine sees it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading

from mvllm.executor.process.pipe_process import kill_pipe_process, receive_message, start_pipe_process, write_message
from mvllm.structured_output.sandbox_main import SECONDS, CompileJob, CompileResult
from mvllm.structured_output.vocabulary import Vocabulary

WALL_SECONDS = 60.0
"""A process that gets no processor time in this long is given up, too."""

_ATTEMPTS = 2


class GrammarSandbox:
    """Starts its process when there is something to try, and again after one that had to be killed.

    Used from one thread, which must live as long as the process is wanted; `close` from any.

    Args:
        vocabulary: The tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def run(self, job: CompileJob) -> CompileResult:
        """Tries a job out; what ends the process is a verdict like any other."""
        for _ in range(_ATTEMPTS):
            process = self._running_process()
            if process is None:
                return CompileResult(None, "the engine is shutting down", is_permanent=False)
            try:
                assert process.stdin is not None and process.stdout is not None
                write_message(process.stdin, job)
                return receive_message(process.stdout, CompileResult, WALL_SECONDS)
            except TimeoutError:
                self._end()
                return CompileResult(
                    None, f"compiling it took longer than {WALL_SECONDS:g} s; try again", is_permanent=False
                )
            except (EOFError, OSError):
                error = _describe_exit_cause(process)
                self._end()
                if error is not None:
                    return CompileResult(None, error)
        error = "the process that compiles grammars was killed while it worked on this one; try again"
        return CompileResult(None, error, is_permanent=False)

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """Ends the process for good. Idempotent."""
        self._closed = True
        self._end()

    def _running_process(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closed:
                return None
            if self._process is not None and self._process.poll() is None:
                return self._process
            self._process = process = start_pipe_process("mvllm.structured_output.sandbox_main")
        with contextlib.suppress(OSError):  # shows when the job is written
            assert process.stdin is not None
            write_message(process.stdin, self._vocabulary)
        return process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            kill_pipe_process(process)


def _describe_exit_cause(process: subprocess.Popen[bytes]) -> str | None:
    """What the job did to the process; None if somebody else ended it."""
    try:
        status = process.wait(timeout=WALL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"compiling it took longer than {WALL_SECONDS:g} s"
    if status == -signal.SIGXCPU:
        return f"compiling it takes more than {SECONDS} s"
    if status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT):
        return None
    return "compiling it takes more memory than allowed, or nests too deep"
