"""Stores responses in memory, so that clients can read and continue them later.

A response is stored as the bytes that were sent, with the conversation up to its end as JSON, so it cannot change and
its size is known. It belongs to the API key of its request: only this key and administrators can read it. Responses
are evicted least recently used first, and are lost when the server ends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.responses.input_items import Message
from mvllm.entrypoints.openai.server.authentication import Caller
from mvllm.logging import get_logger

if TYPE_CHECKING:
    from mvllm.entrypoints.openai.responses.serving import ResponsesHandler

logger = get_logger(__name__)

_OVERHEAD_BYTES = 1 << 10


@dataclass(frozen=True)
class StoredResponse:
    """A response that has ended.

    Attributes:
        body: The response, as JSON.
        conversation: The messages up to its end, as JSON, without the instructions, which apply to one turn.
        cache_salt: The request's: separates the conversation's cached blocks from those of others.
        owner: Digest of the request's API key; None for none.
    """

    body: bytes
    conversation: bytes
    cache_salt: str | None = None
    owner: bytes | None = None

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return len(self.body) + len(self.conversation) + _OVERHEAD_BYTES


class ResponseStore:
    """The responses of one server. Used from one thread.

    Args:
        max_responses: Most stored responses; 0 for none.
        max_bytes: Most bytes of all stored responses.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ended: OrderedDict[str, StoredResponse] = OrderedDict()
        self._running: dict[str, tuple[ResponsesHandler, bytes | None]] = {}  # with the owner
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def is_enabled(self) -> bool:
        """Whether responses are stored."""
        return self._max_responses > 0

    def add_running(self, response_id: str, response: ResponsesHandler, caller: Caller) -> None:
        """Adds a response that is being generated."""
        self._running[response_id] = response, caller.key

    def finish(self, response_id: str, stored: StoredResponse | None = None) -> None:
        """Removes a running response, and stores it if `stored` is given. Idempotent.

        Args:
            stored: The response, if it is to be stored.
        """
        self._running.pop(response_id, None)
        if stored is None or not self.is_enabled:
            return
        if stored.size > self._max_bytes:
            logger.info(
                "A response of %d bytes is not stored: all responses together may have %d bytes.",
                stored.size,
                self._max_bytes,
            )
            return
        self._ended[response_id] = stored
        self.num_bytes += stored.size
        while len(self._ended) > self._max_responses or self.num_bytes > self._max_bytes:
            _, oldest = self._ended.popitem(last=False)
            self.num_bytes -= oldest.size

    def body(self, response_id: str, caller: Caller) -> bytes:
        """The response, as JSON.

        Raises:
            APIError: The response is not known (404).
        """
        running = self._find_running(response_id, caller)
        return running.snapshot() if running is not None else self._find(response_id, caller).body

    def conversation(self, response_id: str | None, caller: Caller) -> list[Message]:
        """The messages up to the end of a response; none without a response id.

        Raises:
            APIError: The response is not known, or is still being generated (400).
        """
        if response_id is None:
            return []
        if self._find_running(response_id, caller) is not None:
            raise _previous_response_error("is still being generated")
        try:
            stored = self._find(response_id, caller)
        except APIError:
            why = "is not known; the server stores a limited number of responses"
            raise _previous_response_error(
                why if self.is_enabled else "is not known: this server stores none"
            ) from None
        return msgspec.json.decode(stored.conversation, type=list[Message])

    def cache_salt(self, response_id: str | None, caller: Caller) -> str | None:
        """The salt of a stored response; None without a response id or a salt."""
        return None if response_id is None else self._find(response_id, caller).cache_salt

    def cancel(self, response_id: str, caller: Caller) -> bytes:
        """Aborts a running response; returns the response so far.

        Raises:
            APIError: The response is not known (404), or has ended (400).
        """
        running = self._find_running(response_id, caller)
        if running is None:
            self._find(response_id, caller)
            raise APIError(400, "The response has ended and cannot be cancelled.", code="response_ended")
        running.cancel()
        return running.snapshot()

    def delete(self, response_id: str, caller: Caller) -> None:
        """Deletes a stored response.

        Raises:
            APIError: The response is not known (404), or is still being generated (400).
        """
        if self._find_running(response_id, caller) is not None:
            raise APIError(400, "The response is still being generated; cancel it first.", code="response_running")
        self.num_bytes -= self._find(response_id, caller).size
        del self._ended[response_id]

    def _find_running(self, response_id: str, caller: Caller) -> ResponsesHandler | None:
        running, owner = self._running.get(response_id, (None, None))
        return running if caller.may_access(owner) else None

    def _find(self, response_id: str, caller: Caller) -> StoredResponse:
        found = self._ended.get(response_id)
        if found is None or not caller.may_access(found.owner):
            raise APIError(404, "No response has this id.", param="response_id", code="response_not_found")
        self._ended.move_to_end(response_id)
        return found


def _previous_response_error(why: str) -> APIError:
    return APIError(
        400,
        f"The response of previous_response_id {why}.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
