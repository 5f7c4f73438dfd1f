"""Stores responses and conversations, so that clients can read and continue them later.

A response is stored as the bytes that were sent, with the items before its output as JSON, so it cannot change and its
size is known. It belongs to the API key of its request: only this key and administrators can use it.

    event loop     ResponseStore ── running responses of this process
    store thread   ResponseDatabase ── all responses, also the running ones of other processes

A response is in the database from its start. Another process cancels it by a mark that its own process looks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from mvllm.extension_api import APIError, get_logger
from mvllm.extension_api.http import Caller, Role
from mvllm_responses.database import (
    EventBatch,
    ResponseDatabase,
    StoredConversation,
    StoredResponse,
    StoreFullError,
    StoreLimits,
)
from mvllm_responses.items import Item, encode_items

logger = get_logger("mvllm.responses.store")

T = TypeVar("T")

COMPLETION_PREFIX = "chatcmpl-"
"""Beginning of the ids of chat completions, which are stored as conversations."""

_ID = re.compile(r"[A-Za-z0-9_\-]{1,128}")
_CANCELLATION_POLL_SECONDS = 0.2
_CANCELLATION_WAIT_SECONDS = 10.0


class RunningResponse(Protocol):
    """A response that this process generates."""

    def snapshot(self) -> bytes:
        """The response as it is now, as JSON."""

    def cancel(self) -> None:
        """Ends it."""


class ResponseStore:
    """The responses and conversations of one server. Used from the event loop.

    Args:
        path: File of the database, which several processes may share; None for a database in memory.
        limits: Of all of them together.

    Raises:
        ConfigError: The file cannot be used.
    """

    def __init__(self, path: str | None, limits: StoreLimits) -> None:
        self.is_enabled = limits.max_objects > 0
        self._database = ResponseDatabase(path, limits)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._running: dict[str, tuple[RunningResponse, bytes | None]] = {}  # with the owner
        self._is_shared = path is not None
        self._cancellation_task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Ends the thread when its work is done. Idempotent."""
        if self._cancellation_task is not None:
            self._cancellation_task.cancel()
        await asyncio.to_thread(self._thread.shutdown)
        self._database.close()

    async def totals(self) -> tuple[int, int]:
        """Number and bytes of all stored objects."""
        return await self._run(self._database.totals)

    # --- running responses

    async def add_running(
        self, response_id: str, response: RunningResponse, stored: StoredResponse, *, is_background: bool
    ) -> bool:
        """Adds a response that is being generated; returns whether it is stored.

        Args:
            stored: What is stored until it has ended.
            is_background: Whether nobody else has the response: if it cannot be stored, it is refused.

        Raises:
            APIError: A background response cannot be stored.
        """
        try:
            await self._run(lambda: self._database.add_response(response_id, stored))
        except StoreFullError:
            if is_background:
                raise APIError(
                    429,
                    "The store of responses has no room for this background response: it is too large, or all stored "
                    "responses are running. Try again later, or send a shorter input.",
                    code="response_store_full",
                    retry_after=5,
                ) from None
            logger.info("A response is not stored: it is too large, or all stored responses are running.")
            return False
        self._running[response_id] = response, stored.owner
        if self._is_shared and (self._cancellation_task is None or self._cancellation_task.done()):
            self._cancellation_task = asyncio.create_task(self._poll_cancellations())
        return True

    def is_running(self, response_id: str) -> bool:
        """Whether this process generates the response."""
        return response_id in self._running

    async def update_running(self, response_id: str, body: bytes) -> None:
        """Replaces what is stored until the response has ended."""
        await self._write(lambda: self._database.update_response(response_id, body))

    async def finish(
        self, response_id: str, body: bytes, conversation_id: str | None = None, items: Sequence[Item] = ()
    ) -> None:
        """Stores the end of a response, and adds items to its conversation.

        Args:
            response_id: A response that is not stored has no effect.
        """
        encoded = encode_items(items) if conversation_id is not None else []
        try:
            await self._write(lambda: self._database.finish_response(response_id, body, conversation_id, encoded))
        finally:  # the thread writes it also if the client leaves now
            self._running.pop(response_id, None)

    def discard(self, response_id: str) -> None:
        """Deletes a running response of this process, if there is one: its client has left."""
        if self._running.pop(response_id, None) is not None:
            with contextlib.suppress(RuntimeError):  # closed
                self._thread.submit(self._database.delete, response_id)

    async def _poll_cancellations(self) -> None:
        """Cancels the responses that other processes have marked, while there are running ones."""
        while self._running:
            await asyncio.sleep(_CANCELLATION_POLL_SECONDS)
            try:
                marked = await self._run(self._database.cancellations)
            except APIError:  # logged; the file may become usable again
                continue
            for response_id in marked:
                if response_id in self._running:
                    self._running[response_id][0].cancel()

    # --- stored responses

    async def body(self, response_id: str, caller: Caller) -> bytes:
        """The response, as JSON.

        Raises:
            APIError: The response is not known (404).
        """
        running = self._find_running(response_id, caller)
        if running is not None:
            return running.snapshot()
        return (await self.response(response_id, caller)).body

    async def response(self, response_id: str, caller: Caller) -> StoredResponse:
        """A response, as it is stored.

        Raises:
            APIError: The response is not known (404).
        """
        found: StoredResponse | None = None
        if _ID.fullmatch(response_id):
            found = await self._run(lambda: self._database.response(response_id))
        if found is None or not caller.may_access(found.owner):
            raise APIError(404, "No response has this id.", param="response_id", code="response_not_found")
        return found

    async def previous(self, response_id: str, caller: Caller) -> tuple[list[Item], str | None]:
        """The items up to the end of a response, and its cache salt.

        Raises:
            APIError: The response is not known, or has not ended well (400).
        """
        try:
            stored = await self.response(response_id, caller)
        except APIError as e:
            if e.status != 404:
                raise
            why = "is not known; the server stores a limited number of responses"
            raise _previous_response_error(
                why if self.is_enabled else "is not known: this server stores none"
            ) from None
        if stored.is_running:
            raise _previous_response_error("is still being generated")
        context = msgspec.json.decode(stored.context, type=list[Item])
        return [*context, *msgspec.json.decode(stored.body)["output"]], stored.cache_salt

    async def cancel(self, response_id: str, caller: Caller) -> bytes:
        """Ends a running response, whichever process generates it; returns the response. A background response may be
        cancelled again.

        Raises:
            APIError: The response is not known (404), or has ended and was not in the background (400).
        """
        running = self._find_running(response_id, caller)
        if running is not None:
            running.cancel()
            return running.snapshot()
        stored = await self.response(response_id, caller)
        if not stored.is_running:
            if msgspec.json.decode(stored.body)["background"]:
                return stored.body
            raise APIError(400, "The response has ended and cannot be cancelled.", code="response_ended")
        await self._run(lambda: self._database.request_cancellation(response_id))
        deadline = asyncio.get_running_loop().time() + _CANCELLATION_WAIT_SECONDS
        while stored.is_running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_CANCELLATION_POLL_SECONDS / 2)
            stored = await self.response(response_id, caller)
        return stored.body

    async def delete(self, response_id: str, caller: Caller) -> None:
        """Deletes a stored response.

        Raises:
            APIError: The response is not known (404), or is still being generated (400).
        """
        if (await self.response(response_id, caller)).is_running:
            raise APIError(400, "The response is still being generated; cancel it first.", code="response_running")
        await self._run(lambda: self._database.delete(response_id))

    # --- events

    async def add_events(self, batches: Sequence[EventBatch]) -> None:
        """Stores events of running responses."""
        await self._write(lambda: self._database.add_events(batches))

    async def events(self, response_id: str, after: int) -> list[EventBatch] | None:
        """See ResponseDatabase."""
        return await self._run(lambda: self._database.events(response_id, after))

    async def has_running(self, response_id: str) -> bool:
        """Whether any process generates the response."""
        found = await self._run(lambda: self._database.response(response_id))
        return found is not None and found.is_running

    # --- conversations

    async def add_conversation(self, conversation_id: str, body: bytes, caller: Caller, items: Sequence[Item]) -> None:
        """Stores a new conversation.

        Raises:
            APIError: It is too large, or this server stores none (400).
        """
        encoded = encode_items(items)
        await self._run_for_conversation(
            lambda: self._database.add_conversation(conversation_id, body, caller.key, encoded)
        )

    async def conversation(self, conversation_id: str, caller: Caller) -> StoredConversation:
        """A conversation.

        Raises:
            APIError: The conversation is not known (404).
        """
        found: StoredConversation | None = None
        if not conversation_id.startswith(COMPLETION_PREFIX):
            found = await self._conversation(conversation_id, caller)
        if found is None:
            raise APIError(404, "No conversation has this id.", param="conversation", code="conversation_not_found")
        return found

    async def _conversation(self, conversation_id: str, caller: Caller) -> StoredConversation | None:
        if not _ID.fullmatch(conversation_id):
            return None
        found = await self._run(lambda: self._database.conversation(conversation_id))
        return found if found is not None and caller.may_access(found.owner) else None

    async def update_conversation(self, conversation_id: str, body: bytes) -> None:
        """Replaces the body of a conversation."""
        await self._run(lambda: self._database.update_conversation(conversation_id, body))

    async def delete_conversation(self, conversation_id: str) -> None:
        """Deletes a conversation and its items."""
        await self._run(lambda: self._database.delete(conversation_id))

    async def add_items(self, conversation_id: str, items: Sequence[Item]) -> None:
        """Adds items to the end of a conversation.

        Raises:
            APIError: The conversation would be too large (400).
        """
        encoded = encode_items(items)
        await self._run_for_conversation(lambda: self._database.add_items(conversation_id, encoded))

    async def items(
        self, conversation_id: str, after: str | None = None, limit: int = -1, *, descending: bool = False
    ) -> list[Item]:
        """Items of a conversation. See ResponseDatabase.

        Raises:
            APIError: `after` is no item of the conversation (400).
        """
        found: list[bytes] | None = None
        if after is None or _ID.fullmatch(after):
            found = await self._run(lambda: self._database.items(conversation_id, after, limit, descending=descending))
        if found is None:
            raise APIError(400, "after is not the id of an item.", param="after")
        return [msgspec.json.decode(data) for data in found]

    async def item(self, conversation_id: str, item_id: str) -> bytes:
        """One item, as JSON.

        Raises:
            APIError: The conversation has no such item (404).
        """
        found: bytes | None = None
        if _ID.fullmatch(item_id):
            found = await self._run(lambda: self._database.item(conversation_id, item_id))
        if found is None:
            raise _item_not_found()
        return found

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        """Deletes an item.

        Raises:
            APIError: The conversation has no such item (404).
        """
        has_deleted = bool(_ID.fullmatch(item_id)) and await self._run(
            lambda: self._database.delete_item(conversation_id, item_id)
        )
        if not has_deleted:
            raise _item_not_found()

    # --- chat completions, which are stored as conversations

    async def completion(self, completion_id: str, caller: Caller) -> StoredConversation:
        """A chat completion.

        Raises:
            APIError: The completion is not known (404).
        """
        found: StoredConversation | None = None
        if completion_id.startswith(COMPLETION_PREFIX):
            found = await self._conversation(completion_id, caller)
        if found is None:
            why = "No stored chat completion has this id: send store=true to store one."
            raise APIError(404, why, param="completion_id", code="completion_not_found")
        return found

    async def completions(
        self,
        caller: Caller,
        after: str | None,
        limit: int,
        *,
        descending: bool,
        model: str | None,
        metadata: Mapping[str, str],
    ) -> list[Item]:
        """The chat completions that the caller may read, in the order in which they were stored.

        Args:
            after: Id of the one before the first.
            limit: Most completions.
            model, metadata: Only those of this model, with these entries.

        Raises:
            APIError: `after` is no completion of the caller (400).
        """

        def matches(body: Item) -> bool:
            given = body["metadata"]
            is_of_model = model is None or body["model"] == model
            return is_of_model and all(given.get(name) == value for name, value in metadata.items())

        def find() -> list[Item] | None:
            found: list[Item] = []
            is_before = after is not None
            stored = self._database.conversations(
                COMPLETION_PREFIX, caller.key, of_all_owners=caller.role is Role.ADMIN, descending=descending
            )
            for object_id, data in stored:
                if is_before:
                    is_before = object_id != after
                elif matches(body := msgspec.json.decode(data)):
                    found.append(body)
                    if len(found) == limit:
                        break
            return None if is_before else found

        completions = await self._run(find)
        if completions is None:
            raise APIError(400, "after is not the id of a stored chat completion.", param="after")
        return completions

    # --- the thread

    def _find_running(self, response_id: str, caller: Caller) -> RunningResponse | None:
        running, owner = self._running.get(response_id, (None, None))
        return running if caller.may_access(owner) else None

    async def _run(self, function: Callable[[], T]) -> T:
        """Runs `function` in the thread.

        Raises:
            APIError: The database cannot be used now (503).
            StoreFullError: As `function`.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except sqlite3.Error as e:
            logger.error("The store of responses cannot be used: %s.", e)
            raise APIError(
                503, "The server's store of responses cannot be used now; try again.", code="store", retry_after=5
            ) from e

    async def _run_for_conversation(self, function: Callable[[], T]) -> T:
        """As `_run`; an APIError if the conversation cannot be stored (400)."""
        try:
            return await self._run(function)
        except StoreFullError:
            why = "The conversation would be larger than all that this server stores; start another one."
            raise APIError(
                400,
                why if self.is_enabled else "This server stores no conversations (--max-stored-responses 0).",
                param="conversation",
                code="response_store_full",
            ) from None

    async def _write(self, function: Callable[[], Any]) -> None:
        """Runs `function` in the thread. The response goes on if it fails: its client may still read it."""
        try:
            await self._run(function)
        except APIError:
            pass  # logged
        except StoreFullError:
            logger.info("A response has become too large to be stored, and was deleted from the store.")


def _previous_response_error(why: str) -> APIError:
    return APIError(
        400,
        f"The response of previous_response_id {why}.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def _item_not_found() -> APIError:
    return APIError(404, "The conversation has no item with this id.", param="item_id", code="item_not_found")
