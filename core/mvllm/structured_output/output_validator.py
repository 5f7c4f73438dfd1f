"""Validates outputs whose JSON schema could not be enforced whole. The work is done by `validation_main`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from mvllm.executor.process.pipe_process import PipeProcess, PipeProcessError
from mvllm.messages.structured_outputs import StructuredOutputsParams
from mvllm.structured_output import validation_main
from mvllm.structured_output.schema_rewriting import is_annotation
from mvllm.structured_output.validation_main import SECONDS, ValidationResult

MAX_WAIT_SECONDS = 10.0
"""An output that was not validated by then, because of a long queue, is returned without."""

_WALL_SECONDS = 8.0
_MAX_SLOW_SCHEMAS = 256
_FAILURES = {
    "time": f"it takes more than {SECONDS} s",
    "memory": "it takes more memory than allowed",
    "timeout": f"it took longer than {_WALL_SECONDS:g} s",
    "killed": "the process that validates was killed",
    "closed": "the engine is shutting down",
}


class HasWarnings(Protocol):
    """A sequence's output."""

    warnings: list[str] | None


@dataclass(frozen=True)
class TextToValidate:
    """A text to validate.

    Attributes:
        message: For the process; None for a constraint whose text is no JSON and has no calls.
        relaxations: What was not enforced.
    """

    message: validation_main.ValidationJob | None
    relaxations: tuple[str, ...]

    @classmethod
    def of(cls, constraint: StructuredOutputsParams, text: str, relaxations: Sequence[str]) -> TextToValidate:
        """The job of a sequence's whole text."""
        relevant = tuple(each for each in relaxations if not is_annotation(each))
        has_calls = constraint.form == "structural_tag"
        if not (has_calls or (constraint.form == "json" and text)):
            return cls(None, relevant)
        schema = str(constraint.structural_tag if has_calls else constraint.json)
        thoughts = constraint.thoughts_start, constraint.thoughts_end
        return cls(validation_main.ValidationJob(schema, text, *thoughts, has_calls), relevant)

    def not_validated(self, reason: str) -> list[str]:
        """The warning that it was not validated."""
        return [f"The output was not validated against {', '.join(self.relaxations)}: {reason}."]


class OutputValidator:
    """Validates texts in a process that is limited and can be killed; it is started for the first one.

    Thread-safe. `close` ends the process.
    """

    def __init__(self) -> None:
        self._process = PipeProcess("mvllm.structured_output.validation_main")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="output-validator")
        self._slow: dict[bytes, str] = {}  # hashes of schemas that have exceeded a limit -> which
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()  # by client

    def validate(self, jobs: Sequence[tuple[HasWarnings, TextToValidate]]) -> None:
        """Sets the warnings of outputs."""
        self.start(jobs)()

    def start(self, jobs: Sequence[tuple[HasWarnings, TextToValidate]]) -> Callable[[], None]:
        """Begins to validate outputs. Returns a function that waits for the end and sets their warnings."""
        submitted = [(output, job, self._submit(job)) for output, job in jobs]
        deadline = time.monotonic() + MAX_WAIT_SECONDS

        def finish() -> None:
            for output, job, future in submitted:
                try:
                    output.warnings = future.result(max(0.0, deadline - time.monotonic()))
                except FutureTimeoutError:
                    future.cancel()
                    output.warnings = job.not_validated("too many outputs are waiting")

        return finish

    async def validate_async(self, jobs: Sequence[tuple[HasWarnings, TextToValidate]], client: Hashable = None) -> None:
        """As `validate`, in an event loop.

        Args:
            client: Whose outputs they are. One of each client is validated at a time, so nobody's hostile schemas make
                others wait for more than one of them.
        """
        for output, job in jobs:
            output.warnings = job.not_validated("too many outputs are waiting")
        turn = self._turns.setdefault(client, asyncio.Lock())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_WAIT_SECONDS), turn:
                for output, job in jobs:
                    output.warnings = await asyncio.wrap_future(self._submit(job))

    def close(self) -> None:
        """Ends the process for good. Idempotent."""
        self._process.close()
        self._thread.shutdown(wait=False)

    def _submit(self, job: TextToValidate) -> Future[list[str]]:
        try:
            return self._thread.submit(self._run, job)
        except RuntimeError:  # after `close`
            done: Future[list[str]] = Future()
            done.set_result(job.not_validated(_FAILURES["closed"]))
            return done

    def _run(self, job: TextToValidate) -> list[str]:
        if job.message is None:
            return job.not_validated("it is not one JSON text")
        key = hashlib.sha256(job.message.schema.encode()).digest()
        if key in self._slow:
            return job.not_validated(_FAILURES[self._slow[key]])
        try:
            result = self._process.run(job.message, ValidationResult, _WALL_SECONDS)
        except PipeProcessError as e:
            if e.reason in ("time", "timeout", "memory"):
                self._slow[key] = e.reason
                if len(self._slow) > _MAX_SLOW_SCHEMAS:
                    del self._slow[next(iter(self._slow))]
            return job.not_validated(_FAILURES[e.reason])
        return result.warnings if result.error is None else job.not_validated(result.error)
