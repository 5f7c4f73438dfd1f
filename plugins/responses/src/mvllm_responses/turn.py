"""One turn of the model within a response: a chat completion whose output becomes items."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from functools import cached_property
from typing import Any

from mvllm.extension_api import SamplingParams
from mvllm.extension_api.http import (
    ChatCompletionRequest,
    CompletionOutput,
    Conversation,
    PromptType,
    RequestHandler,
    ServingContext,
    TokenFormatter,
    UsageCounter,
    chat_logprobs,
    encode_json,
    max_truncated_length,
    num_prompt_tokens,
    renamed_fields,
    without_oldest_messages,
)
from mvllm_responses.input_items import CHAT_TO_RESPONSES_FIELDS
from mvllm_responses.output_items import OutputItems

_SHOWN_PARAMETERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


class ResponseTurn(RequestHandler):
    """One turn. See the module.

    Args:
        context, model: As for RequestHandler.
        request: The equivalent chat completion request.
        turn_id: Id of its request to the engine.
        items: Gets the turn's items.
        truncates: Whether to leave out the oldest messages if the conversation is too long for the model.

    Attributes:
        finish_reason: Why the turn has ended; None before, and if it was aborted.
        num_reasoning_tokens: Generated tokens that belong to the reasoning, known at the end.
    """

    def __init__(
        self,
        context: ServingContext,
        model: str,
        request: ChatCompletionRequest,
        turn_id: str,
        items: OutputItems,
        *,
        truncates: bool,
    ) -> None:
        self._conversation = Conversation(context, request)
        super().__init__(context, model, "", request.priority, self._conversation.constraint)
        self._id = turn_id
        self._usage = UsageCounter()
        self._items = items
        self._truncates = truncates
        self.finish_reason: str | None = None
        self.num_reasoning_tokens = 0

    async def start(self) -> None:
        """Adds the prompt to the engine. See Handler."""
        with renamed_fields(CHAT_TO_RESPONSES_FIELDS):
            await super().start()

    async def full_response(self) -> bytes:
        """The items of the response so far, as JSON."""
        async for _ in self.stream():
            pass
        return encode_json(self._items.items)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Reads the turn to its end, and yields the events of its items; first nothing, when it has begun.

        Raises:
            RequestError, APIError: The turn failed in the engine.
            EngineDeadError: The engine has stopped.
        """
        has_begun = False
        prompt: str | None = None
        token_ids: list[int] = []
        first_item = len(self._items.items)
        async with contextlib.aclosing(self._conversation.read_deltas(self._engine_requests, self._usage)) as outputs:
            async for output, deltas in outputs:
                if not has_begun:
                    has_begun = True
                    yield b""  # events of the caller come before those of the first output
                prompt = output.prompt
                entries: list[dict[str, Any]] = []
                for sequence in output.outputs:  # there is one
                    token_ids += sequence.token_ids
                    self.finish_reason = sequence.finish_reason
                    entries = self._logprobs(sequence)
                yield self._items.append(deltas, entries)
        written = self._items.finish("completed" if self.finish_reason == "stop" else "incomplete")
        if any(item["type"] == "reasoning" for item in self._items.items[first_item:]):
            self.num_reasoning_tokens = await self._context.tokenizer_pool.run(
                lambda: self._conversation.count_reasoning_tokens(token_ids, prompt)
            )
        yield written

    def usage(self) -> dict[str, Any]:
        """The tokens so far, in the format of the API."""
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        }

    @property
    def is_started(self) -> bool:
        """Whether its prompt is in the engine."""
        return self._started is not None

    @property
    def is_constrained(self) -> bool:
        """Whether its output has a constraint, which is compiled while it starts."""
        return self._constraint is not None

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that the model has generated so far."""
        return self._usage.num_completion_tokens

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that a response shows."""
        return {name: getattr(self._conversation.params, name) for name in _SHOWN_PARAMETERS}

    @cached_property
    def _token_formatter(self) -> TokenFormatter:
        skip_special = self._conversation.params.skip_special_tokens
        return TokenFormatter(self._engine.tokenizer, as_ids=False, skip_special=skip_special)

    def _logprobs(self, sequence: CompletionOutput) -> list[dict[str, Any]]:
        request = self._conversation.request
        if not request.logprobs or sequence.logprobs is None:
            return []
        num_top = request.top_logprobs or 0
        found: list[dict[str, Any]] = chat_logprobs(
            self._token_formatter, sequence.token_ids, sequence.logprobs, num_top
        )["content"]
        is_visible = map(self._token_formatter.is_visible, sequence.token_ids)
        return [entry for entry, visible in zip(found, is_visible, strict=False) if visible and entry["bytes"]]

    async def count_prompt_tokens(self) -> int:
        """The number of tokens of its prompt, which is not run."""
        return sum(map(num_prompt_tokens, await self._build_prompts()))

    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], SamplingParams]:
        prompts = await self._build_prompts()
        return prompts, self._conversation.params

    async def _build_prompts(self) -> Sequence[PromptType]:
        conversation = self._conversation
        if self._truncates:
            limit = max_truncated_length(conversation.request, self._engine)
            conversation.request = await without_oldest_messages(conversation.request, self._context, limit)
        return await conversation.build_prompts()
