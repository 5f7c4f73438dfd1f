"""Chat completions that are stored (`store: true`): saved at their end, and read, changed, listed and deleted later.

They are in the store of responses, as conversations: the completion is the conversation's body, and the messages of its
request are the items. So they belong to the key of their request, and have the limits of all stored objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from mvllm.extension_api import APIError, RequestError, get_logger
from mvllm.extension_api.http import (
    DONE,
    Caller,
    ChatCompletionHandler,
    ChatCompletionRequest,
    Handler,
    encode_json,
)
from mvllm_responses.items import Item, check_metadata
from mvllm_responses.store import ResponseStore

logger = get_logger("mvllm.responses.stored_completions")


class StoredCompletionHandler(Handler):
    """Answers a chat completion request, and stores the completion before the end of the response.

    Args:
        inner: The handler of the request.
        request: The body of the HTTP request.
        store: Where completions are stored.
        caller: The sender of the request.

    Raises:
        RequestError: On construction: `metadata` is not valid.
    """

    def __init__(
        self, inner: ChatCompletionHandler, request: ChatCompletionRequest, store: ResponseStore, caller: Caller
    ) -> None:
        self._inner, self._store, self._caller = inner, store, caller
        self._metadata = checked_metadata(request.metadata)
        self._messages = [_stored_message(i, message) for i, message in enumerate(request.messages or ())]
        self.is_streaming = inner.is_streaming

    async def start(self) -> None:
        """See Handler."""
        self._inner.lora_request = self.lora_request
        await self._inner.start()
        self.relaxations = self._inner.relaxations

    def close(self) -> None:
        """See Handler."""
        self._inner.close()

    @property
    def num_tokens(self) -> int:
        """See Handler."""
        return self._inner.num_tokens

    async def full_response(self) -> bytes:
        """See Handler."""
        body = await self._inner.full_response()
        await self._save(msgspec.json.decode(body))
        return body

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """See Handler. All chunks pass here: the handler gets no connection to write to."""
        assembled = _AssembledCompletion()
        async with contextlib.aclosing(self._inner.stream()) as parts:
            async for part in parts:
                for line in part.split(b"\n\n"):
                    if line.startswith(b"data: {"):
                        assembled.add(msgspec.json.decode(line[6:]))
                if part.endswith(DONE) and not assembled.has_failed:
                    await self._save({**assembled.completion, "usage": self._inner.usage.to_usage()})
                yield part

    async def _save(self, completion: dict[str, Any]) -> None:
        body = encode_json({**completion, "metadata": self._metadata})
        items: list[Item] = [{"id": f"{completion['id']}-{i}", **each} for i, each in enumerate(self._messages)]
        try:
            await self._store.add_conversation(completion["id"], body, self._caller, items)
        except APIError as e:  # the client has its answer all the same
            logger.info("A chat completion is not stored: %s", e.message)


class _AssembledCompletion:
    """A completion from the chunks of its stream."""

    def __init__(self) -> None:
        self.completion: dict[str, Any] = {}
        self.has_failed = False

    def add(self, chunk: dict[str, Any]) -> None:
        """Adds a chunk."""
        if "choices" not in chunk:
            self.has_failed = True
            return
        if "warnings" in chunk:  # of the last choice
            self.completion["warnings"] = chunk["warnings"]
        if not self.completion:
            fields = {name: value for name, value in chunk.items() if name not in ("choices", "usage")}
            self.completion = {**fields, "object": "chat.completion", "choices": []}
        choices: list[dict[str, Any]] = self.completion["choices"]
        for part in chunk["choices"]:
            while len(choices) <= part["index"]:
                message: dict[str, Any] = {"role": "assistant", "content": None}
                choices.append({"index": len(choices), "message": message, "logprobs": None, "finish_reason": None})
            choice = choices[part["index"]]
            _add_delta(choice["message"], part["delta"])
            if part["finish_reason"] is not None:
                choice["finish_reason"] = part["finish_reason"]
            if part.get("logprobs") is not None:
                logprobs = choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
                logprobs["content"] += part["logprobs"]["content"]


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value:
                if part["index"] >= len(calls):
                    calls.append({name: part[name] for name in ("id", "type", "function") if name in part})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments", "")
        elif name != "role" and isinstance(value, str) and (value or message.get(name) is not None):
            message[name] = (message.get(name) or "") + value


def checked_metadata(metadata: object) -> dict[str, str]:
    """The metadata of a completion.

    Raises:
        RequestError: It is no object of texts, or too large.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise RequestError("metadata must be an object of texts.", parameter="metadata")
    check_metadata(metadata)
    return metadata


def _stored_message(index: int, message: dict[str, Any]) -> Item:
    """A message as it is listed: its parts have a field of their own."""
    content = message.get("content")
    is_text = not isinstance(content, list)
    fields = {name: value for name, value in message.items() if name not in ("id", "content")}
    return {**fields, "content": content if is_text else None, "content_parts": None if is_text else content}
