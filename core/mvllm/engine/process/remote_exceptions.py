"""How an exception of an engine core comes to be raised in the front end's process, as the class it was.

Only classes of mvllm's own errors and of Python's built-in ones are made again: a stranger's constructor is never run.
Any other class becomes the nearest of these that it is derived from, with its own name before the text. The causes
follow, and last the whole traceback as text.
"""

from __future__ import annotations

import builtins
import itertools
import os
import traceback

from mvllm import errors
from mvllm.errors import EngineDeadError
from mvllm.messages.core_protocol import ExceptionInfo, ProcessFailure

_MAX_CHAINED_EXCEPTIONS = 6
_MAX_TEXT = 16 << 10  # a failure must fit into a socket's buffer: nobody may be reading
_PLAIN_TYPES = (int, float, str, type(None))


class ProcessTraceback(Exception):
    """A traceback of an engine core's process, as text.

    Attributes:
        failure: All that is known.
    """

    def __init__(self, failure: ProcessFailure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        failure = self.failure
        return f"\n\nIn {failure.name} (pid {failure.pid}), during {failure.activity}:\n{failure.traceback}"


def describe_process_failure(error: BaseException, *, name: str, activity: str) -> ProcessFailure:
    """`error`, ready to travel. Never raises: an exception whose text cannot be had travels without it."""
    links: list[ExceptionInfo] = []
    link: BaseException | None = error
    while link is not None and len(links) < _MAX_CHAINED_EXCEPTIONS:
        links.append(_describe_exception(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception as e:  # noqa: BLE001  (an exception with a broken __str__: its class still travels)
        trace = f"(the traceback cannot be had: {type(e).__name__})"
    return ProcessFailure(name, os.getpid(), activity, links, _truncate_text(trace))


def rebuild_exception(failure: ProcessFailure) -> Exception:
    """The exception that `failure` describes, with its causes."""
    chain: list[Exception] = [_rebuild(link) for link in failure.exceptions]
    chain.append(ProcessTraceback(failure))
    for error, cause in itertools.pairwise(chain):
        error.__cause__ = cause
    return chain[0]


def _describe_exception(error: BaseException) -> ExceptionInfo:
    try:
        message = str(error)
    except Exception as e:  # noqa: BLE001
        message = f"(its text cannot be had: {type(e).__name__})"
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__[:-1]]
    own = vars(error).items() if type(error).__module__ == errors.__name__ else ()
    facts = {name: value for name, value in own if isinstance(value, _PLAIN_TYPES)}
    return ExceptionInfo(kinds, _truncate_text(message), facts)


def _rebuild(link: ExceptionInfo) -> Exception:
    for kind in link.class_names:
        cls = _known_class(kind)
        if cls is None:
            continue
        is_exact = kind == link.class_names[0]
        message = link.message if is_exact else f"{link.class_names[0].removeprefix('builtins.')}: {link.message}"
        try:
            error = cls(message, **link.attributes) if is_exact else cls(message)
            if str(error) == message:
                return error
        except Exception:  # noqa: BLE001  (a class that takes more than a text: its base will do)
            continue
    return EngineDeadError(f"{link.class_names[0].removeprefix('builtins.')}: {link.message}")


def _known_class(kind: str) -> type[Exception] | None:
    module, _, name = kind.rpartition(".")
    owner = {errors.__name__: errors, "builtins": builtins}.get(module)
    cls = getattr(owner, name, None) if owner is not None else None
    return cls if isinstance(cls, type) and issubclass(cls, Exception) else None


def _truncate_text(text: str) -> str:
    """`text` as valid Unicode, its middle left out where it is very long."""
    if len(text) > _MAX_TEXT:
        text = f"{text[: _MAX_TEXT // 2]}\n[...]\n{text[-_MAX_TEXT // 2 :]}"
    return text.encode(errors="backslashreplace").decode()
