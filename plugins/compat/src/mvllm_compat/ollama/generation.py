"""`POST /api/chat` and `/api/generate`: answers as lines of JSON, or as one object.

An answer is a chat completion in another format: the request is converted to a chat completion request, and the deltas
of the same parsers become lines. A tool call is sent when it is complete, because its arguments are an object.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from mvllm.extension_api import (
    APIError,
    ContentDelta,
    Delta,
    ReasoningDelta,
    RequestError,
    RequestOutput,
    SamplingParams,
    ToolCallDelta,
)
from mvllm.extension_api.http import (
    JSON_LINES,
    ChatCompletionRequest,
    Conversation,
    OutputParser,
    PromptType,
    RequestHandler,
    RequestMetrics,
    ServingContext,
    TokensPrompt,
    ToolCall,
    UsageCounter,
    encode_json,
    is_too_long,
    max_truncated_length,
    num_prompt_tokens,
    to_api_error,
    without_oldest_messages,
)
from mvllm_compat.ollama.api_format import OllamaFormat
from mvllm_compat.ollama.durations import RequestDurations
from mvllm_compat.ollama.input_messages import chat_request, generate_request
from mvllm_compat.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from mvllm_compat.tool_arguments import arguments_object


@dataclass
class AnswerPart:
    """New parts of an answer: of one line, or of all of it."""

    content: str = ""
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.tool_calls)


class AnswerReader:
    """Collects deltas into parts of an answer, whose tool calls are complete."""

    def __init__(self) -> None:
        self._head: ToolCallDelta | None = None  # of the call that is being written
        self._arguments: list[str] = []

    def read(self, deltas: Iterable[Delta], part: AnswerPart) -> None:
        """Adds deltas to a part."""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                part.content += delta.text
            elif isinstance(delta, ReasoningDelta):
                part.thinking += delta.text
            elif isinstance(delta, ToolCallDelta):
                if self._head is None or self._head.index != delta.index:
                    self.finish(part)
                    self._head = delta
                self._arguments.append(delta.arguments)

    def finish(self, part: AnswerPart) -> None:
        """Ends the call that is being written, and adds it to a part."""
        head, self._head = self._head, None
        if head is not None:
            call = ToolCall(head.id or "", head.name or "", "".join(self._arguments))
            function = {"index": head.index, "name": call.name, "arguments": arguments_object(call.arguments)}
            part.tool_calls.append({"id": call.id, "function": function})
        self._arguments = []


class OllamaHandler(RequestHandler):
    """Answers one request of the Ollama API.

    Args:
        context: As for RequestHandler.
        model: The model's name, as the request has it.
        request: The equivalent chat completion request.
        truncates: Whether a prompt that is too long loses its beginning.

    Raises:
        RequestError: On construction: a field is not valid.
    """

    stream_format = JSON_LINES

    def __init__(self, context: ServingContext, model: str, request: ChatCompletionRequest, *, truncates: bool) -> None:
        self._conversation = Conversation(context, request)
        super().__init__(context, model, "ollama-", request.priority, self._conversation.constraint)
        self.is_streaming = bool(request.stream)
        self._usage = UsageCounter()
        self._truncates = truncates
        self.durations = RequestDurations()
        self._reader = AnswerReader()
        self._done_reason: str | None = None
        self._metrics: RequestMetrics | None = None

    async def start(self) -> None:
        """See Handler."""
        self.durations.note_loaded()
        await super().start()

    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], SamplingParams]:
        prompts = await self._build_prompts()
        return prompts, self._conversation.params

    async def _build_prompts(self) -> Sequence[PromptType]:
        if not self._truncates:
            return await self._build_whole_prompts()
        try:
            prompts = await self._build_whole_prompts()
        except RequestError as e:
            if not is_too_long(e):
                raise
        else:
            if all(num_prompt_tokens(each) < self._engine.model_config.max_model_len for each in prompts):
                return prompts
        conversation = self._conversation
        limit = max_truncated_length(conversation.request, self._engine)
        request = conversation.request = await without_oldest_messages(conversation.request, self._context, limit)
        if all(isinstance(each["content"], str) for each in request.messages or ()):  # it may be too long still
            request.truncate_prompt_tokens = limit
            conversation.params = msgspec.structs.replace(conversation.params, truncate_prompt_tokens=limit)
        return await self._build_whole_prompts()

    async def _build_whole_prompts(self) -> Sequence[PromptType]:
        return await self._conversation.build_prompts()

    async def full_response(self) -> bytes:
        """The body of the response. See Handler."""
        answer = AnswerPart()
        async with contextlib.aclosing(self._read_deltas()) as outputs:
            async for output, deltas in outputs:
                self._reader.read(deltas, answer)
                self._note_end(output)
        self._reader.finish(answer)
        return encode_json(self._last_line(answer))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response as lines of JSON. See Handler."""
        part = AnswerPart()
        try:
            async with contextlib.aclosing(self._read_deltas()) as outputs:
                async for output, deltas in outputs:
                    self._reader.read(deltas, part)
                    self._note_end(output)
                    if part and self._done_reason is None:  # the last lines are sent with the stream's end
                        yield self._line(part)
                        part = AnswerPart()
        except Exception as e:  # noqa: BLE001  (to_api_error logs what the client does not see)
            yield (self._line(part) if part else b"") + OllamaFormat().error_event(to_api_error(e))
            return
        self._reader.finish(part)
        yield (self._line(part) if part else b"") + encode_json(self._last_line(AnswerPart())) + b"\n"

    def _read_deltas(self) -> AsyncGenerator[tuple[RequestOutput, list[Delta]], None]:
        return self._conversation.read_deltas(self._engine_requests, self._usage)

    @abstractmethod
    def _part_fields(self, part: AnswerPart) -> dict[str, Any]:
        """The fields of a line that have a part of the answer."""

    def _line(self, part: AnswerPart) -> bytes:
        return encode_json({**first_fields(self._model), **self._part_fields(part), "done": False}) + b"\n"

    def _last_line(self, part: AnswerPart) -> dict[str, Any]:
        """The line that ends the answer: why it has ended, counts of tokens, and durations in nanoseconds."""
        prompt_ns, eval_ns = _durations(self._metrics)
        return {
            **first_fields(self._model),
            **self._part_fields(part),
            "done": True,
            "done_reason": self._done_reason or "stop",
            **self.durations.fields(),
            "prompt_eval_count": self._usage.num_prompt_tokens,
            "prompt_eval_duration": prompt_ns,
            "eval_count": self._usage.num_completion_tokens,
            "eval_duration": eval_ns,
            **self.warning_fields,
        }

    def _note_end(self, output: RequestOutput) -> None:
        """Remembers why the answer has ended, if it has.

        Raises:
            APIError: It was aborted (503).
        """
        self._metrics = output.metrics or self._metrics
        for sequence in output.outputs:  # there is one
            if sequence.finish_reason == "abort":
                raise APIError(503, "The request was aborted; try again.", code="aborted", retry_after=1)
            self._done_reason = sequence.finish_reason or self._done_reason


class OllamaChatHandler(OllamaHandler):
    """Answers one request to `/api/chat`. See OllamaHandler."""

    def __init__(self, context: ServingContext, model: str, request: OllamaChatRequest) -> None:
        truncates = request.truncate is not False
        super().__init__(context, request.model or model, chat_request(request), truncates=truncates)

    def _part_fields(self, part: AnswerPart) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.content}
        if part.thinking:
            message["thinking"] = part.thinking
        if part.tool_calls:
            message["tool_calls"] = part.tool_calls
        return {"message": message}


class OllamaGenerateHandler(OllamaHandler):
    """Answers one request to `/api/generate`. See OllamaHandler."""

    def __init__(self, context: ServingContext, model: str, request: OllamaGenerateRequest) -> None:
        truncates = request.truncate is not False
        super().__init__(context, request.model or model, generate_request(request), truncates=truncates)
        self._prompt = request.prompt or ""
        self._is_raw = bool(request.raw)
        self._has_system = bool(request.system)
        if self._is_raw:
            self._conversation.output_parser = OutputParser()

    async def _build_whole_prompts(self) -> Sequence[PromptType]:
        pool, renderer = self._context.tokenizer_pool, self._context.prompt_renderer
        # A model without a chat template continues the prompt. It has no place for a system message.
        if self._is_raw or (not self._has_system and not await pool.run(renderer.template_text)):
            truncated = self._conversation.params.truncate_prompt_tokens is not None
            ids = await pool.encode(self._prompt, add_special_tokens=True, truncated=truncated)
            return [TokensPrompt(prompt_token_ids=ids, prompt=self._prompt)]
        return await super()._build_whole_prompts()

    def _part_fields(self, part: AnswerPart) -> dict[str, Any]:
        fields = {"response": part.content}
        return {**fields, "thinking": part.thinking} if part.thinking else fields


def first_fields(model: str) -> dict[str, Any]:
    """The first fields of every line: the model and the time."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def _durations(metrics: RequestMetrics | None) -> tuple[int, int]:
    """Nanoseconds from the start of the prompt to the first token, and from there to the last one; at least 1, because
    clients divide by them."""
    if metrics is None or metrics.first_token_time is None:
        return 1, 1
    start = metrics.first_scheduled_time or metrics.arrival_time
    end = metrics.last_token_time or metrics.first_token_time
    prompt, tokens = metrics.first_token_time - start, end - metrics.first_token_time
    return max(1, round(prompt * 1e9)), max(1, round(tokens * 1e9))
