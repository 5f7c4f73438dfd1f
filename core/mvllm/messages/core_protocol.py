"""What a front end and an engine core in another process say to each other. Typed msgpack; nothing is pickled.

    front end  ── AddRequests | AbortRequests | CallUtility ──────>  engine core      numbered from 1
    its owner  ── StopCore | DropClient ─────────────────────>  engine core      which may be a front end, too
    front end  <───────────────────── EngineCoreOutputs ───────────  engine core

News say how many commands have been taken and whether there is work left. So a front end whose commands were all taken
by a core without work knows that nothing more will come, and need not follow single requests for that. Where several
front ends share a core, each numbers its own commands and hears of its own requests only.
"""

from __future__ import annotations

import msgspec

from mvllm.messages.lora import LoRARequest


class AddRequests(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Requests that begin together.

    Attributes:
        request_ids: Their ids, so that one whose rest cannot be read can be named.
        requests: Each an EngineCoreRequest, still encoded.
    """

    request_ids: list[str]
    requests: list[msgspec.Raw]


class AbortRequests(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Requests to drop, in whatever state they are. Unknown ids are ignored."""

    request_ids: list[str]


class CallUtility(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """A call that is answered with a UtilityResult.

    Attributes:
        id: Given back in the result.
        method: `reset_prefix_cache`, `check_health`, `sleep`, `wake_up`, `add_lora` or `remove_lora`.
        argument: The level of `sleep`, the tags of `wake_up`, the adapter of `add_lora`, or the id of `remove_lora`'s.
    """

    id: int
    method: str
    argument: int | list[str] | LoRARequest | None = None


class StopCore(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """End after the step under way."""


class DropClient(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """A front end has died: drop all of its requests, and tell it nothing any more.

    Attributes:
        index: Which one, in the order of the core's addresses.
    """

    index: int


Command = AddRequests | AbortRequests | CallUtility | StopCore | DropClient


class ExceptionInfo(msgspec.Struct, frozen=True):
    """One exception of a chain of causes.

    Attributes:
        kinds: Its class and the classes it is derived from, nearest first, `package.module.Class`.
        message: Its text.
        facts: Its plain attributes, under the names of its constructor's arguments, where it is one of mvllm's own.
    """

    class_names: list[str]
    message: str
    attributes: dict[str, int | float | str | None] = {}


class ProcessFailure(msgspec.Struct, frozen=True):
    """An exception on its way from an engine core.

    Attributes:
        name, pid: The process it was raised in.
        activity: What that was doing.
        links: The exception, then its causes.
        traceback: The whole traceback, causes included.
    """

    name: str
    pid: int
    activity: str
    exceptions: list[ExceptionInfo]
    traceback: str


class UtilityResult(msgspec.Struct, array_like=True, frozen=True):
    """What became of a call: its value, or why it failed."""

    id: int
    value: bool | None = None
    failure: ProcessFailure | None = None
