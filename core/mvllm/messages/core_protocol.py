"""What a front end and an engine core in another process say to each other. Typed msgpack; nothing is pickled.

    front end  ── AddRequests | AbortRequests | CallUtility ──────>  engine core      numbered from 1
    its owner  ── StopCore | DropClient ─────────────────────>  engine core      which may be a front end, too
    front end  <─ EngineCoreUpdate(taken, is_busy, outputs, results) ───  engine core

News say how many commands have been taken and whether there is work left. So a front end whose commands were all taken
by a core without work knows that nothing more will come, and need not follow single requests for that. Where several
front ends share a core, each numbers its own commands and hears of its own requests only.
"""

from __future__ import annotations

import msgspec

from mvllm.messages.lora import LoRARequest
from mvllm.messages.process_failure import ProcessFailure
from mvllm.messages.requests import EngineCoreOutputs

UtilityArg = int | list[str] | LoRARequest
"""What a utility method of the engine core takes."""


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
        method: One of the engine core's UTILITY_METHODS.
        args: Its arguments.
    """

    id: int
    method: str
    args: tuple[UtilityArg, ...] = ()


class StopCore(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """End after the step under way."""


class DropClient(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """A front end has died: drop all of its requests, and tell it nothing any more.

    Attributes:
        index: Which one, in the order of the core's addresses.
    """

    index: int


Command = AddRequests | AbortRequests | CallUtility | StopCore | DropClient


class UtilityResult(msgspec.Struct, array_like=True, frozen=True):
    """What became of a call: its value, or why it failed."""

    id: int
    value: bool | None = None
    failure: ProcessFailure | None = None


class EngineCoreUpdate(msgspec.Struct, array_like=True, frozen=True):
    """What a front end learns at once.

    Attributes:
        num_acknowledged: The number of the last command that the core has received.
        is_busy: Whether there is work left, of this front end's.
        outputs: Of one step.
        results: Of calls.
    """

    num_acknowledged: int
    is_busy: bool
    outputs: EngineCoreOutputs
    results: list[UtilityResult] = []
