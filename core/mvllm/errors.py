"""The exception classes of mvllm.

A message says what was requested, what was found and what to do. The class says which part is at fault (request,
configuration, model, platform, engine), so that a caller can choose an HTTP status or an exit status.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NAME_OF_EXCEPTION = re.compile(r"(?:\bGot: )?\b(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b(?:: ?|\(| )?")


class MvllmError(Exception):
    """Base class of all exceptions that mvllm raises."""


class RequestError(MvllmError, ValueError):
    """A request is invalid; the engine is not affected.

    Args:
        message: What is wrong, in terms of the request.
        parameter: The invalid field of the request, or None for the request as a whole.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class RequestFailedError(RequestError):
    """Requests of one call failed while they were processed. The others have run to their end.

    Args:
        message: The error of the first failed request.
        parameter: The field that caused it, or None.
        outputs: The outputs that the call would have returned, in the order of its prompts, with those of the failed
            requests: these have an `error`.
    """

    def __init__(self, message: str, *, parameter: str | None = None, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message, parameter=parameter)
        self.outputs = list(outputs)


class ConfigError(MvllmError, ValueError):
    """Settings are invalid, alone or in combination."""


class ModelError(MvllmError, ValueError):
    """A model folder is missing, incomplete, inconsistent or not supported."""


class CacheError(ConfigError):
    """The KV cache does not fit into the available memory."""


class StepMemoryError(CacheError):
    """A step ran out of memory next to the KV cache."""


class PlatformError(MvllmError, RuntimeError):
    """No platform plugin is available, or the chosen one failed."""


class UnsupportedMethodError(PlatformError):
    """The platform's worker does not implement an optional method."""


class ContractError(PlatformError):
    """A platform plugin was built for a contract version that this core does not support."""


class EngineDeadError(MvllmError, RuntimeError):
    """The engine has stopped because of an earlier error, which is the cause of this one."""


class UnavailableError(MvllmError, RuntimeError):
    """The engine cannot accept a valid request now, but may accept it later.

    Args:
        retry_after: Seconds after which the request may be retried.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(UnavailableError):
    """The number of waiting requests has reached `max_queued_requests`."""


class EngineSleepingError(UnavailableError):
    """The engine is asleep."""


class WorkerError(MvllmError, RuntimeError):
    """A worker process failed; the worker's exception and traceback are the cause.

    Args:
        message: The complete report.
        rank: The worker's rank.
        pid: Its process id, or None if the process was not started.
        activity: The call that it was running, for instance `execute_model of step 12`.
    """

    def __init__(self, message: str, *, rank: int, pid: int | None, activity: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid
        self.activity = activity


class WorkerDiedError(WorkerError):
    """A worker process exited or was killed.

    Args:
        exit_code: Its exit status, or minus the number of the signal that ended it; None if unknown.
    """

    def __init__(self, message: str, *, rank: int, pid: int | None, activity: str, exit_code: int | None) -> None:
        super().__init__(message, rank=rank, pid=pid, activity=activity)
        self.exit_code = exit_code


class WorkerStuckError(WorkerError, TimeoutError):
    """A worker exceeded its time limit; the message contains its stack."""


def plain_reason(error: BaseException) -> str:
    """The message of a library's exception as one line without exception names, for users.

    If the chain of causes contains an error of the operating system, its message is used.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror
        cause = cause.__cause__ or cause.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (_NAME_OF_EXCEPTION.sub("", lines[0]) if lines else "").strip(" .:") or "no reason was given"
