"""Exceptions that cross a process boundary: from a worker to its executor, from an engine core to its front ends.

    describe_failure(error) ── ProcessFailure, as msgpack ──> failure.to_exception()

Only classes of mvllm's own errors and of Python's built-in ones are rebuilt: no other constructor runs. Any other class
becomes its nearest base among these, with its own name before the text. The causes follow as `__cause__`, except for a
worker's exception; the last cause is a RemoteTraceback with the whole traceback as text.
"""

from __future__ import annotations

import builtins
import itertools
import os
import traceback

import msgspec

from mvllm import errors
from mvllm.errors import EngineDeadError, MvllmError, WorkerError

_MAX_CHAINED_EXCEPTIONS = 6
_MAX_TEXT = 16 << 10  # characters; a failure must fit into a socket's buffer, because its reader may be busy
_PLAIN_TYPES = (int, float, str, type(None))


class ExceptionInfo(msgspec.Struct, frozen=True):
    """One exception of a chain of causes.

    Attributes:
        class_names: Its class and the base classes, nearest first, as `package.module.Class`.
        message: Its text.
        attributes: Its attributes of plain types, by the names of its constructor's arguments; empty unless its class
            is one of mvllm's errors.
    """

    class_names: list[str]
    message: str
    attributes: dict[str, int | float | str | None] = {}

    def to_exception(self) -> Exception:
        """The exception, of its own class or the nearest known base, without a cause."""
        for class_name in self.class_names:
            cls = _known_class(class_name)
            if cls is None:
                continue
            is_exact = class_name == self.class_names[0]
            message = self.message if is_exact else self.described
            try:
                error = cls(message, **self.attributes) if is_exact else cls(message)
                if str(error) == message:
                    return error
            except Exception:  # noqa: BLE001  (its constructor takes more than a text: try its base)
                continue
        return EngineDeadError(self.described)

    @property
    def described(self) -> str:
        """Class and text in one line, for an exception that is raised as another class."""
        return f"{self.class_names[0].removeprefix('builtins.')}: {self.message}"


class ProcessFailure(msgspec.Struct, frozen=True):
    """An exception of another process, in a form that can be sent.

    Attributes:
        name, pid: The process in which it was raised, for instance `EngineCore`.
        activity: What that process was doing: a phase of start-up, or a method and its step.
        exceptions: The exception, then its causes.
        traceback: The whole traceback, causes included.
        rank: The worker's rank, where the process is a worker.
    """

    name: str
    pid: int
    activity: str
    exceptions: list[ExceptionInfo]
    traceback: str
    rank: int | None = None

    @property
    def message(self) -> str:
        """The exception's text."""
        return self.exceptions[0].message

    def to_exception(self) -> Exception:
        """The exception, to be raised in this process.

        A worker's exception says which worker failed; unless it is one of mvllm's errors, which callers tell apart by
        their class, it is a WorkerError. Its cause is the RemoteTraceback, which contains those of its own causes.
        """
        if self.rank is None:
            chain = [info.to_exception() for info in self.exceptions]
        else:
            chain = [self._worker_error(self.exceptions[0], self.rank)]
        chain.append(RemoteTraceback(self))
        for error, cause in itertools.pairwise(chain):
            error.__cause__ = cause
        return chain[0]

    def _worker_error(self, info: ExceptionInfo, rank: int) -> Exception:
        where = f"{self.name} (rank {rank}, pid {self.pid}) failed in {self.activity}: "
        cls = _known_class(info.class_names[0])
        if cls is not None and issubclass(cls, MvllmError) and not issubclass(cls, WorkerError):
            return cls(where + info.message)
        return WorkerError(where + info.described, rank=rank, pid=self.pid, activity=self.activity)


class RemoteTraceback(Exception):
    """The traceback of another process, as text; the last cause of an exception that came from there.

    Attributes:
        failure: The failure as it was received.
    """

    def __init__(self, failure: ProcessFailure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        failure = self.failure
        return f"\n\nIn {failure.name} (pid {failure.pid}), during {failure.activity}:\n{failure.traceback}"


def describe_failure(error: BaseException, *, name: str, activity: str, rank: int | None = None) -> ProcessFailure:
    """`error` of this process as a ProcessFailure. Never raises: an unprintable exception is sent without its text."""
    infos: list[ExceptionInfo] = []
    link: BaseException | None = error
    while link is not None and len(infos) < _MAX_CHAINED_EXCEPTIONS:
        infos.append(_describe_exception(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  (an exception with a broken __str__)
        trace = "".join(traceback.format_tb(error.__traceback__))
    return ProcessFailure(name, os.getpid(), activity, infos, _truncate_text(trace), rank)


def _describe_exception(error: BaseException) -> ExceptionInfo:
    try:
        message = str(error)
    except Exception as e:  # noqa: BLE001  (an exception with a broken __str__)
        message = f"(its text cannot be read: {type(e).__name__})"
    class_names = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__[:-1]]
    own = vars(error).items() if type(error).__module__ == errors.__name__ else ()
    attributes = {name: value for name, value in own if isinstance(value, _PLAIN_TYPES)}
    return ExceptionInfo(class_names, _truncate_text(message), attributes)


def _known_class(class_name: str) -> type[Exception] | None:
    module, _, name = class_name.rpartition(".")
    owner = {errors.__name__: errors, "builtins": builtins}.get(module)
    cls = getattr(owner, name, None) if owner is not None else None
    return cls if isinstance(cls, type) and issubclass(cls, Exception) else None


def _truncate_text(text: str) -> str:
    """`text` as valid Unicode; of a very long one the middle is left out."""
    if len(text) > _MAX_TEXT:
        text = f"{text[: _MAX_TEXT // 2]}\n[...]\n{text[-_MAX_TEXT // 2 :]}"
    return text.encode(errors="backslashreplace").decode()
