"""`POST /v1/chat/completions`: the assistant's next message of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cached_property
from typing import Any

from starlette.requests import Request

from mvllm.engine.frontend.outputs import CompletionOutput, RequestOutput
from mvllm.entrypoints.openai.common.choices import (
    NULL_RESPONSE_FIELDS,
    ChoiceEncoder,
    ChoicesStream,
    encode_whole,
    end_fields,
)
from mvllm.entrypoints.openai.common.conversation import Conversation
from mvllm.entrypoints.openai.common.handler import Handler, RequestHandler
from mvllm.entrypoints.openai.common.json_response import encode_json
from mvllm.entrypoints.openai.common.logprobs import (
    TokenFormatter,
    chat_logprobs,
    conditional_logprobs,
    prompt_logprobs,
)
from mvllm.entrypoints.openai.common.server_sent_events import ChunkEncoder
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.usage import UsageCounter
from mvllm.entrypoints.openai.protocol import ChatCompletionRequest
from mvllm.entrypoints.parsers.interface import finish_reason_with_tools, merge_deltas
from mvllm.entrypoints.parsers.output_parser import OutputParserStream
from mvllm.messages.inputs import PromptType
from mvllm.messages.sampling_params import SamplingParams


class ChatCompletionHandler(RequestHandler):
    """Answers one chat completion request.

    Args:
        context, model: As for RequestHandler.
        request: The body of the HTTP request.

    Raises:
        RequestError: On construction: a setting is not acceptable.

    Attributes:
        usage: Counts the tokens.
    """

    def __init__(self, context: ServingContext, model: str, request: ChatCompletionRequest) -> None:
        self._conversation = conversation = Conversation(context, request)
        super().__init__(context, model, "chatcmpl-", request.priority, conversation.constraint)
        self.is_streaming = bool(request.stream)
        self._request = request
        self.usage = UsageCounter()
        if conversation.output_parser.has_reasoning:
            self.usage.num_reasoning = 0

    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], SamplingParams]:
        prompts = await self._conversation.build_prompts()
        return prompts, self._conversation.params

    async def full_response(self) -> bytes:
        """The body of the response. See Handler."""
        decodes_tokens = self._conversation.output_parser.has_reasoning
        takes_long = self._conversation.params.prompt_logprobs is not None or decodes_tokens
        run_in_thread = self._context.tokenizer_pool.run if takes_long else None
        return await encode_whole(self._engine_requests, self.usage, self._encode_response, run_in_thread)

    def stream(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. See Handler."""
        return ChoicesStream(
            self._context,
            self._engine_requests,
            self.usage,
            self._common_fields("chat.completion.chunk"),
            self._request.stream_options,
            self._conversation.params.n,
            self._make_choice_encoder,
            self.connection,
        ).events()

    def _encode_response(self, outputs: Sequence[RequestOutput]) -> bytes:
        [output] = outputs
        response: dict[str, Any] = {
            **self._common_fields("chat.completion"),
            **NULL_RESPONSE_FIELDS,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "choices": [self._full_choice(sequence, output) for sequence in output.outputs],
            "usage": self.usage.to_usage(),
            **end_fields(self._engine_requests, outputs),
        }
        self._add_prompt_fields(response, output)
        if self._request.return_prompt_text:
            response["prompt_text"] = output.prompt
        return encode_json(response)

    def _full_choice(self, sequence: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        stream = self._conversation.parser_stream(output)
        parsed = merge_deltas([*stream.feed(sequence.text), *stream.finish(sequence.finish_reason)])
        message = parsed.as_json()
        if stream.num_reasoning_deltas:
            self.add_reasoning_tokens(self._conversation.count_reasoning_tokens(sequence.token_ids, output.prompt))
        if self._request.echo:
            message["content"] = self._echoed_text() + (message["content"] or "")
        choice: dict[str, Any] = {
            "index": sequence.index,
            "message": message,
            "logprobs": self._logprobs(sequence),
            "finish_reason": self._finish_reason(sequence.finish_reason, len(parsed.tool_calls)),
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.token_ids if self._request.return_token_ids else None,
        }
        if sequence.conditional_logprobs is not None:
            choice["conditional_logprobs"] = conditional_logprobs(sequence.conditional_logprobs)
        if self._request.return_weight_versions:
            choice["weight_versions"] = sequence.weight_versions
        return choice

    def add_reasoning_tokens(self, number: int) -> None:
        """Adds reasoning tokens of one choice to the usage."""
        self.usage.num_reasoning = (self.usage.num_reasoning or 0) + number

    def _make_choice_encoder(self, index: int, chunks: ChunkEncoder) -> ChoiceEncoder:
        return _ChatChoice(self, index, chunks).encode

    def _finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """The finish reason of a choice. It is not `tool_calls` if the request names the function to call."""
        return reason if self._conversation.tool_choice.mode == "named" else finish_reason_with_tools(reason, num_calls)

    @cached_property
    def _token_formatter(self) -> TokenFormatter:
        skip_special = self._conversation.params.skip_special_tokens
        as_ids = bool(self._request.return_tokens_as_token_ids)
        return TokenFormatter(self._engine.tokenizer, as_ids=as_ids, skip_special=skip_special)

    def _logprobs(self, sequence: CompletionOutput) -> dict[str, Any] | None:
        if not self._request.logprobs or sequence.logprobs is None:
            return None
        return chat_logprobs(
            self._token_formatter, sequence.token_ids, sequence.logprobs, self._request.top_logprobs or 0
        )

    def _add_prompt_fields(self, target: dict[str, Any], output: RequestOutput) -> None:
        if self._request.prompt_logprobs is not None:
            target["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        if self._request.return_token_ids:
            target["prompt_token_ids"] = output.prompt_token_ids

    def _echoed_text(self) -> str:
        """The text of the last message if the request asks for `echo`, else an empty text."""
        messages = self._request.messages if self._request.echo else None
        content = messages[-1].get("content") if messages else None
        return content if isinstance(content, str) else ""


StoreCompletion = Callable[[ChatCompletionHandler, ChatCompletionRequest, Request], Handler]
"""Makes a handler that stores the completion of another, of a request with `store: true`. It may return the handler
that it gets."""


class _ChatChoice:
    """Encodes one choice of a stream: a chunk with the role, chunks with the text, a chunk with the finish reason."""

    def __init__(self, handler: ChatCompletionHandler, index: int, chunks: ChunkEncoder) -> None:
        request = handler._request
        self._handler = handler
        self._index = index
        self._chunks = chunks
        self._has_started = False
        self._return_token_ids = bool(request.return_token_ids)
        self._return_weight_versions = bool(request.return_weight_versions)
        conversation = handler._conversation
        is_passthrough = conversation.output_parser.is_passthrough and not conversation.tool_choice.is_constrained
        self._plain = is_passthrough and not (
            request.logprobs or self._return_token_ids or self._return_weight_versions or chunks.continuous_usage
        )
        before = b'{"index":%d,"delta":{"content":' % index
        self._before, self._after = chunks.wrap(before, b'},"logprobs":null,"finish_reason":null}')
        self._parser_stream: OutputParserStream | None = None
        self._token_ids: list[int] = []  # while they are needed to count the tokens of the reasoning
        self._num_tokens = 0
        self._num_reasoning = 0

    def encode(self, output: RequestOutput, sequence: CompletionOutput) -> bytes:
        """The chunks of the next output."""
        text = sequence.text
        if self._plain and self._has_started and sequence.finish_reason is None:  # most calls
            return self._before + encode_json(text) + self._after if text else b""
        encoded = b""
        if not self._has_started:
            self._has_started = True
            fields: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if self._return_token_ids else {}
            if self._handler._request.return_prompt_text:
                fields["prompt_text"] = output.prompt
            encoded = self._chunks.encode_start_of_choice(self._first_choice(output), len(sequence.token_ids), fields)
        if self._plain:
            if text:
                encoded += self._before + encode_json(text) + self._after
        elif text or sequence.token_ids or sequence.finish_reason is not None:
            if self._parser_stream is None:
                self._parser_stream = self._handler._conversation.parser_stream(output)
            choices = self._delta_choices(sequence, self._parser_stream, output.prompt)
            encoded += b"".join(map(self._chunks.encode_delta, choices))
        if sequence.finish_reason is not None:
            encoded += self._chunks.encode_end_of_choice(self._last_choice(sequence))
        return encoded

    def _first_choice(self, output: RequestOutput) -> bytes:
        choice = self._choice({"role": "assistant", "content": self._handler._echoed_text()})
        self._handler._add_prompt_fields(choice, output)
        return encode_json(choice)

    def _delta_choices(self, sequence: CompletionOutput, stream: OutputParserStream, prompt: str | None) -> list[bytes]:
        """The choice of each delta. The first has the token ids and the log-probabilities."""
        before = stream.num_reasoning_deltas, stream.in_reasoning
        deltas = [delta.as_json() for delta in stream.feed(sequence.text)]
        if sequence.finish_reason is not None:
            deltas += [delta.as_json() for delta in stream.finish(sequence.finish_reason)]
        if self._handler._conversation.output_parser.has_reasoning:
            self._count_reasoning(sequence, stream, prompt, has_reasoned=before != (stream.num_reasoning_deltas, False))
        logprobs = self._handler._logprobs(sequence)
        if not deltas and (logprobs is not None or self._return_token_ids or self._return_weight_versions):
            deltas = [{}]
        choices = []
        for i, delta in enumerate(deltas):
            choice = self._choice(delta, logprobs if i == 0 else None)
            if i == 0 and sequence.conditional_logprobs is not None:
                choice["conditional_logprobs"] = conditional_logprobs(sequence.conditional_logprobs)
            if self._return_token_ids:
                choice["token_ids"] = sequence.token_ids if i == 0 else []
            if self._return_weight_versions:
                choice["weight_versions"] = sequence.weight_versions if i == 0 else []
            choices.append(encode_json(choice))
        return choices

    def _count_reasoning(
        self, sequence: CompletionOutput, stream: OutputParserStream, prompt: str | None, *, has_reasoned: bool
    ) -> None:
        """Adds the new tokens to the usage, up to the end of the reasoning.

        Args:
            has_reasoned: Some of them belong to the reasoning.
        """
        before = self._num_tokens
        self._num_tokens += len(sequence.token_ids)
        self._token_ids += sequence.token_ids
        if not has_reasoned or not stream.num_reasoning_deltas:
            return
        num_reasoning = self._num_tokens
        if not stream.in_reasoning and len(sequence.token_ids) > 1:  # it has ended within these tokens
            num_reasoning = self._handler._conversation.count_reasoning_tokens(self._token_ids, prompt, before)
        self._handler.add_reasoning_tokens(num_reasoning - self._num_reasoning)
        self._num_reasoning = num_reasoning

    def _last_choice(self, sequence: CompletionOutput) -> bytes:
        reason, stream = sequence.finish_reason, self._parser_stream
        choice = self._choice({})
        choice["finish_reason"] = reason if stream is None else self._handler._finish_reason(reason, stream.num_calls)
        return encode_json({**choice, "stop_reason": sequence.stop_reason})

    def _choice(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
