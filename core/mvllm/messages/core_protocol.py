"""Messages between a front end and an engine core in another process. Typed msgpack; nothing is pickled.

    front end       ── AddRequests | AbortRequests | CallCore ──>     engine core      numbered from 1
    parent process  ── StopCore | DropClient ──────────────────────>  engine core      (may be a front end, too)
    front end      <── EngineCoreOutputs ───────────────────────────  engine core      (requests.py)

`EngineCoreOutputs` contains the number of the last command received and whether the core has unfinished requests. When
all commands are acknowledged and the core is not busy, no more outputs follow. If several front
ends share a core, each numbers its own commands and receives the outputs of its own requests.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mvllm.messages.process_failure import ProcessFailure


class AddRequests(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Requests to queue, all before the next step.

    Attributes:
        request_ids: Their ids, which the core needs for the error if it cannot decode a request.
        requests: One encoded EngineCoreRequest each. The features of an item that several requests have are in the
            first of them only, see `omit_sent_features`.
    """

    request_ids: list[str]
    requests: list[msgspec.Raw]


class AbortRequests(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Requests to abort, in any state. Unknown ids are ignored."""

    request_ids: list[str]


class CallCore(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """A command of `commands.py`, which is answered with a CallResult.

    Attributes:
        id: Given back in the result.
        name: The command's.
        command: The command, encoded: the caller gets the error if it cannot be decoded.
    """

    id: int
    name: str
    command: msgspec.Raw


class StopCore(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Stop after the current step."""


class DropClient(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """A front end has died: abort its requests and send it no more outputs.

    Attributes:
        index: Its position in the core's list of addresses.
    """

    index: int


CoreMessage = AddRequests | AbortRequests | CallCore | StopCore | DropClient


class CallResult(msgspec.Struct, array_like=True, frozen=True):
    """The result of a CallCore: its value (numbers, texts, lists and dicts), or the exception that it raised."""

    id: int
    value: Any = None
    failure: ProcessFailure | None = None
