"""`POST /v1/completions`: continuations of one or several prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import cached_property
from typing import Any, cast

import msgspec

from mvllm.engine.frontend.outputs import CompletionOutput, RequestOutput
from mvllm.entrypoints.openai.common.choices import (
    NULL_RESPONSE_FIELDS,
    ChoicesStream,
    encode_whole,
    end_fields,
)
from mvllm.entrypoints.openai.common.handler import RequestHandler
from mvllm.entrypoints.openai.common.json_response import encode_json
from mvllm.entrypoints.openai.common.logprobs import (
    CompletionLogprobs,
    TokenFormatter,
    conditional_logprobs,
    prompt_logprobs,
)
from mvllm.entrypoints.openai.common.output_constraint import output_constraint
from mvllm.entrypoints.openai.common.prompt_inputs import build_prompts, split_prompts
from mvllm.entrypoints.openai.common.request_sampling_params import completion_sampling_params
from mvllm.entrypoints.openai.common.server_sent_events import ChunkEncoder
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.usage import UsageCounter
from mvllm.entrypoints.openai.protocol import CompletionRequest
from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType
from mvllm.messages.sampling_params import SamplingParams

_NULL_FIELDS = ("prompt_logprobs", "token_ids", "prompt_token_ids")

MAX_PROMPTS = 2048
"""Sequences of one request: each is a request of the engine."""

MAX_EMBEDS = 64
"""Entries of `prompt_embeds` of one request."""


class CompletionHandler(RequestHandler):
    """Answers one completion request.

    Args:
        context, model: As for RequestHandler.
        request: The body of the HTTP request.

    Raises:
        RequestError: On construction: a setting is not acceptable.
    """

    def __init__(self, context: ServingContext, model: str, request: CompletionRequest) -> None:
        constraint = output_constraint(request)
        params = completion_sampling_params(request, context.engine.model_config.generation_defaults, constraint)
        if params.thinking_token_budget is not None and (parser := context.prompt_renderer.reasoning_parser):
            params = msgspec.structs.replace(params, thinking_tags=parser.budget_tags())
        super().__init__(context, model, "cmpl-", request.priority, constraint)
        self.is_streaming = bool(request.stream)
        self.is_prompt_only = bool(request.echo) and request.max_tokens == 0
        self._request = request
        self._params = params
        self._usage = UsageCounter(count_completion=not self.is_prompt_only)

    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], SamplingParams]:
        return await self._build_prompts(), self._params

    async def full_response(self) -> bytes:
        """The body of the response. See Handler."""
        run_in_thread = None if self._params.prompt_logprobs is None else self._context.tokenizer_pool.run
        return await encode_whole(self._engine_requests, self._usage, self._encode_response, run_in_thread)

    def stream(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. See Handler."""
        return ChoicesStream(
            self._context,
            self._engine_requests,
            self._usage,
            self._common_fields("text_completion"),
            self._request.stream_options,
            self._params.n,
            lambda index, chunks: _CompletionChoice(self, index, chunks).encode,
            self.connection,
        ).events()

    async def _build_prompts(self) -> list[PromptType]:
        request, num_sequences = self._request, self._params.num_sequences
        embeds = await self._read_embeds()
        prompts = [] if embeds and not request.prompt else split_prompts(request.prompt, "prompt")
        if (len(prompts) + len(embeds)) * num_sequences > MAX_PROMPTS:
            raise RequestError(
                f"One request may ask for {MAX_PROMPTS} sequences; this one has {len(prompts) + len(embeds)} prompts "
                f"and asks for {num_sequences} of each. Send several requests.",
                parameter="prompt",
            )
        return embeds + await build_prompts(
            self._context.tokenizer_pool,
            prompts,
            add_special_tokens=request.add_special_tokens,
            cache_salt=request.cache_salt,
            truncated=self._params.truncate_prompt_tokens is not None,
        )

    async def _read_embeds(self) -> list[PromptType]:
        """The prompts that are embeddings."""
        given = self._request.prompt_embeds
        if given is None or given == []:
            return []
        if self._request.echo:
            raise RequestError("echo cannot be combined with prompt_embeds, which have no text.", parameter="echo")
        files = [given] if isinstance(given, str) else given
        if len(files) > MAX_EMBEDS:
            raise RequestError(
                f"prompt_embeds may have {MAX_EMBEDS} entries; found {len(files)}.", parameter="prompt_embeds"
            )
        salt = {} if self._request.cache_salt is None else {"cache_salt": self._request.cache_salt}
        return [cast(PromptType, {**prompt, **salt}) for prompt in await self._engine.read_prompt_embeds(files)]

    def _encode_response(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices = [
            _CompletionChoice(self, position * self._params.n + sequence.index).build(output, sequence)
            for position, output in enumerate(outputs)
            for sequence in output.outputs
        ]
        for choice in choices:  # clients of other engines read these
            choice.update({name: None for name in _NULL_FIELDS if name not in choice})
        fields = {**self._common_fields("text_completion"), **NULL_RESPONSE_FIELDS}
        last = end_fields(self._engine_requests, outputs)
        return encode_json({**fields, "choices": choices, "usage": self._usage.to_usage(), **last})

    @cached_property
    def token_formatter(self) -> TokenFormatter:
        """Formats the tokens of log-probabilities."""
        as_ids = bool(self._request.return_tokens_as_token_ids)
        skip_special = self._params.skip_special_tokens
        return TokenFormatter(self._engine.tokenizer, as_ids=as_ids, skip_special=skip_special)

    def prompt_text(self, output: RequestOutput) -> str:
        """The prompt, as text."""
        if output.prompt is not None:
            return output.prompt
        skip = self._request.skip_special_tokens is not False
        return self._engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip)


class _CompletionChoice:
    """Builds one choice, and encodes it chunk by chunk for a stream."""

    def __init__(self, handler: CompletionHandler, index: int, chunks: ChunkEncoder | None = None) -> None:
        request = handler._request
        self._handler = handler
        self._index = index
        self._chunks = chunks
        self._echo = bool(request.echo)
        self._is_first = True
        self._return_token_ids = bool(request.return_token_ids)
        self._return_weight_versions = bool(request.return_weight_versions)
        self._logprobs: CompletionLogprobs | None = None  # made with the first output, which has the prompt
        with_logprobs = request.logprobs is not None or request.prompt_logprobs is not None
        self._plain = not (self._echo or self._return_token_ids or self._return_weight_versions or with_logprobs)
        self._before = b'{"index":%d,"text":' % index

    def encode(self, output: RequestOutput, sequence: CompletionOutput) -> bytes:
        """The chunk of the next output; empty if it has no text."""
        assert self._chunks is not None
        if sequence.finish_reason is not None:
            return self._chunks.encode_end_of_choice(encode_json(self.build(output, sequence)))
        if not self._plain:
            return self._chunks.encode_delta(encode_json(self.build(output, sequence)))
        if not sequence.text:
            return b""
        text = encode_json(sequence.text)
        return self._chunks.encode_delta(
            self._before + text + b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
        )

    def build(self, output: RequestOutput, sequence: CompletionOutput) -> dict[str, Any]:
        """The choice of an output. The first has the echoed prompt and the prompt's fields."""
        text, token_ids, positions = sequence.text, sequence.token_ids, sequence.logprobs or []
        if self._handler.is_prompt_only:
            text, token_ids, positions = "", [], []
        first, self._is_first = self._is_first, False
        echoed = self._handler.prompt_text(output) if self._echo and first else ""
        choice: dict[str, Any] = {
            "index": self._index,
            "text": echoed + text,
            "logprobs": None,
            "finish_reason": "length" if self._handler.is_prompt_only else sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        if (num_top := self._handler._request.logprobs) is not None:
            prompt_ids = output.prompt_token_ids
            if self._logprobs is None:
                self._logprobs = CompletionLogprobs(self._handler.token_formatter, num_top, prompt_ids)
            lists: dict[str, list[Any]] = {}
            if self._echo and first:
                lists = self._logprobs.format_prompt(echoed, prompt_ids, output.prompt_logprobs or [])
            following = self._logprobs.format_next(token_ids, positions)
            choice["logprobs"] = {name: lists.get(name, []) + values for name, values in following.items()}
        if sequence.conditional_logprobs is not None and not self._handler.is_prompt_only:
            choice["conditional_logprobs"] = conditional_logprobs(sequence.conditional_logprobs)
        if self._handler._request.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        if self._return_weight_versions:
            choice["weight_versions"] = sequence.weight_versions
        if self._return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        return choice
