"""Responses that can be asked for, and gone on with, after they have been given: as many as fit, in memory.

The idea: a response is kept as the bytes that were sent, beside the messages of the conversation that it ended, as
bytes, too. So what is kept cannot change, and its size is known. A response belongs to the key that it was made with:
to the holder of another one, unless that is an administrator's, it does not exist. Nothing outlives the server.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import msgspec

from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.responses.input_items import Message
from mvllm.entrypoints.openai.server.authentication import Caller
from mvllm.logging import get_logger

logger = get_logger(__name__)

_OVERHEAD_BYTES = 1 << 10


class RunningResponse(Protocol):
    """A response that is being written."""

    def snapshot(self) -> bytes:
        """What there is of it."""

    def cancel(self) -> None:
        """Ends it."""


@dataclass(frozen=True)
class StoredResponse:
    """A response that has ended.

    Attributes:
        body: As it was given.
        conversation: The messages up to its end, as JSON; without the instructions, which are of one turn only.
        cache_salt: Of its request: with whom the conversation's cached blocks are shared.
        owner: The digest of the key that it was made with; None for none.
    """

    body: bytes
    conversation: bytes
    cache_salt: str | None = None
    owner: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes, roughly."""
        return len(self.body) + len(self.conversation) + _OVERHEAD_BYTES


class ResponseStore:
    """The responses of one server, those used longest ago dropped first. Used from one thread.

    Args:
        max_responses: How many are kept; 0 for none.
        max_bytes: How many bytes they may take.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ended: OrderedDict[str, StoredResponse] = OrderedDict()
        self._running: dict[str, tuple[RunningResponse, bytes | None]] = {}  # with its owner
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def is_enabled(self) -> bool:
        """Whether anything is kept here."""
        return self._max_responses > 0

    def add_running(self, response_id: str, response: RunningResponse, caller: Caller) -> None:
        """From now on it can be asked for."""
        self._running[response_id] = response, caller.key

    def finish(self, response_id: str, stored: StoredResponse | None = None) -> None:
        """It is not written any more. Idempotent.

        Args:
            stored: What is kept of it, if anything is.
        """
        self._running.pop(response_id, None)
        if stored is None or not self.is_enabled:
            return
        if stored.size > self._max_bytes:
            logger.info("A response of %d bytes is not kept: there is room for %d.", stored.size, self._max_bytes)
            return
        self._ended[response_id] = stored
        self.num_bytes += stored.size
        while len(self._ended) > self._max_responses or self.num_bytes > self._max_bytes:
            _, oldest = self._ended.popitem(last=False)
            self.num_bytes -= oldest.size

    def body(self, response_id: str, caller: Caller) -> bytes:
        """The response, as JSON.

        Raises:
            APIError: It is not known (404).
        """
        running = self._find_running(response_id, caller)
        return running.snapshot() if running is not None else self._find(response_id, caller).body

    def conversation(self, response_id: str | None, caller: Caller) -> list[Message]:
        """The messages up to the end of a response; none where there is no such one.

        Raises:
            APIError: It is not known, or still being written (400).
        """
        if response_id is None:
            return []
        if self._find_running(response_id, caller) is not None:
            raise _previous_response_error("is still being written")
        try:
            found = self._find(response_id, caller)
        except APIError:
            why = "is not known here; the server keeps some, and those used longest ago are dropped first"
            raise _previous_response_error(why if self.is_enabled else "is not known: this server keeps none") from None
        return msgspec.json.decode(found.conversation, type=list[Message])

    def cache_salt(self, response_id: str | None, caller: Caller) -> str | None:
        """The salt of a response that `conversation` has found; None where it had none, or there is no such one."""
        return None if response_id is None else self._find(response_id, caller).cache_salt

    def cancel(self, response_id: str, caller: Caller) -> bytes:
        """Ends a response that is being written; returns what there is of it.

        Raises:
            APIError: It is not known (404), or has ended (400).
        """
        running = self._find_running(response_id, caller)
        if running is None:
            self._find(response_id, caller)
            raise APIError(400, "The response has ended and cannot be cancelled.", code="response_ended")
        running.cancel()
        return running.snapshot()

    def delete(self, response_id: str, caller: Caller) -> None:
        """Forgets a response.

        Raises:
            APIError: It is not known (404), or is being written (400).
        """
        if self._find_running(response_id, caller) is not None:
            raise APIError(400, "The response is still being written; cancel it first.", code="response_running")
        self.num_bytes -= self._find(response_id, caller).size
        del self._ended[response_id]

    def _find_running(self, response_id: str, caller: Caller) -> RunningResponse | None:
        running, owner = self._running.get(response_id, (None, None))
        return running if caller.may_access(owner) else None

    def _find(self, response_id: str, caller: Caller) -> StoredResponse:
        found = self._ended.get(response_id)
        if found is None or not caller.may_access(found.owner):
            raise APIError(404, "There is no such response here.", param="response_id", code="response_not_found")
        self._ended.move_to_end(response_id)
        return found


def _previous_response_error(why: str) -> APIError:
    return APIError(
        400,
        f"The response of previous_response_id {why}.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
