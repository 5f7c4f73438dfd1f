"""Client of the process that compiles grammars under limits. The process runs `sandbox_main`."""

from __future__ import annotations

from mvllm.executor.process.pipe_process import PipeProcess, PipeProcessError
from mvllm.structured_output.sandbox_main import SECONDS, CompileJob, CompileResult
from mvllm.structured_output.vocabulary import Vocabulary

WALL_SECONDS = 60.0
"""Longest time for one grammar, for a process that gets no processor time."""

_FAILURES = {
    "time": CompileResult(None, f"compiling it takes more than {SECONDS} s"),
    "memory": CompileResult(None, "compiling it takes more memory than allowed, or nests too deep"),
    "timeout": CompileResult(None, f"compiling it took longer than {WALL_SECONDS:g} s; try again", is_permanent=False),
    "killed": CompileResult(
        None, "the process that compiles grammars was killed while it worked on this one; try again", is_permanent=False
    ),
    "closed": CompileResult(None, "the engine is shutting down", is_permanent=False),
}


class GrammarSandbox:
    """Compiles grammars in a process that is limited and can be killed.

    Used from one thread, which must live as long as the process; `close` from any.

    Args:
        vocabulary: The tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._process = PipeProcess("mvllm.structured_output.sandbox_main", vocabulary)

    def run(self, job: CompileJob) -> CompileResult:
        """Compiles a grammar. A job that exceeds a limit has an error as its result."""
        try:
            return self._process.run(job, CompileResult, WALL_SECONDS)
        except PipeProcessError as e:
            return _FAILURES[e.reason]

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return self._process.pid

    def close(self) -> None:
        """Ends the process for good. Idempotent."""
        self._process.close()
