"""`POST /v1/completions`: the model goes on with one or several prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, cast

from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend.outputs import CompletionOutput, RequestOutput
from mvllm.entrypoints.openai.common.errors import to_api_error
from mvllm.entrypoints.openai.common.logprobs import CompletionLogprobs, TokenFormatter, prompt_logprobs
from mvllm.entrypoints.openai.common.output_constraint import output_constraint
from mvllm.entrypoints.openai.common.request_sampling_params import completion_sampling_params
from mvllm.entrypoints.openai.common.server_sent_events import DONE, ChunkEncoder, encode_json, error_event
from mvllm.entrypoints.openai.common.serving_base import GenerationHandler
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.openai.protocol import CompletionRequest
from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType

MAX_PROMPTS = 2048
"""Prompts in one request: each is a request of the engine's."""


class CompletionHandler(GenerationHandler):
    """One request for completions.

    Args:
        engine: What answers it.
        tokenizer_pool: Where text is tokenized.
        model: The model's name in the answer.
        request: As it was sent.

    Raises:
        RequestError: On construction: a setting is not acceptable.
    """

    _request: CompletionRequest

    def __init__(self, engine: AsyncLLM, tokenizer_pool: TokenizerPool, model: str, request: CompletionRequest) -> None:
        form = output_constraint(request)
        params = completion_sampling_params(request, engine.model_config.generation_defaults, form)
        super().__init__(engine, model, request, "cmpl-", params, form)
        self._text_work = tokenizer_pool
        self._is_cut = params.truncate_prompt_tokens is not None
        self._is_prompt_only = bool(request.echo) and request.max_tokens == 0
        self._token_formatter = TokenFormatter(
            engine.tokenizer,
            as_ids=bool(request.return_tokens_as_token_ids),
            skip_special=self._params.skip_special_tokens,
        )

    async def full_response(self) -> bytes:
        """The whole answer."""
        assert self._engine_requests is not None
        outputs = await self._engine_requests.collect()
        for position, output in enumerate(outputs):
            self._usage.add(position, output)

        def build() -> bytes:
            return encode_json(
                {
                    **self._common_fields(),
                    "choices": [
                        self._choice(position, output, sequence)
                        for position, output in enumerate(outputs)
                        for sequence in output.outputs
                    ],
                    "usage": self._usage.to_usage(without_completion=self._is_prompt_only),
                }
            )

        if self._params.prompt_logprobs is None:
            return build()
        return await self._text_work.run(build)  # there may be many

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer's events; an error is one of them."""
        assert self._engine_requests is not None
        include, continuous = self._stream_usage_options()
        frame = ChunkEncoder(self._common_fields(), with_usage=include)
        pieces: dict[int, _ChoiceEncoder] = {}
        written = b""
        num_open = self._engine_requests.num_prompts
        try:
            async for position, output in self._engine_requests.outputs():
                self._usage.add(position, output)
                for sequence in output.outputs:
                    index = position * self._params.n + sequence.index
                    choice = pieces.get(index)
                    if choice is None:
                        choice = pieces[index] = _ChoiceEncoder(self, index)
                    if choice.is_first and output.prompt_logprobs:  # there may be many
                        encoded = await self._text_work.run(partial(choice.encode_next, output, sequence))
                    else:
                        encoded = choice.encode_next(output, sequence)
                    if encoded and continuous:
                        usage = self._usage.to_usage(without_completion=self._is_prompt_only)
                        written += frame.encode_with_usage(encoded, usage)
                    elif encoded:
                        written += frame.encode(encoded)
                    if sequence.finish_reason == "error":
                        raise self._engine_requests.error_of(sequence)
                num_open -= output.finished
                if written and num_open:  # else it leaves together with the stream's end
                    yield written
                    written = b""
        except Exception as e:  # noqa: BLE001  (logged where it is not an answer)
            yield written + error_event(to_api_error(e))
            return
        if include:
            written += frame.encode_with_usage(b"", self._usage.to_usage(without_completion=self._is_prompt_only))
        yield written + DONE

    async def _build_prompts(self) -> list[PromptType]:
        prompts = _prompts(self._request.prompt)
        if len(prompts) * self._params.num_sequences > MAX_PROMPTS:
            raise RequestError(
                f"One request may ask for {MAX_PROMPTS} sequences; this one has {len(prompts)} prompts and asks for "
                f"{self._params.num_sequences} of each. Send several requests.",
                parameter="prompt",
            )
        made: list[PromptType] = []
        for prompt in prompts:
            salt = {} if self._request.cache_salt is None else {"cache_salt": self._request.cache_salt}
            if isinstance(prompt, str) and self._request.add_special_tokens is False:
                ids = await self._text_work.encode(prompt, add_special_tokens=False, truncated=self._is_cut)
                made.append(cast(PromptType, {"prompt_token_ids": ids, "prompt": prompt, **salt}))
            elif isinstance(prompt, str):
                made.append(cast(PromptType, {"prompt": prompt, **salt}))
            else:
                made.append(cast(PromptType, {"prompt_token_ids": prompt, **salt}))
        return made

    def _common_fields(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}

    def _choice(self, position: int, output: RequestOutput, sequence: CompletionOutput) -> dict[str, Any]:
        pieces = _ChoiceEncoder(self, position * self._params.n + sequence.index)
        return pieces.build(output, sequence)

    def prompt_text(self, output: RequestOutput) -> str:
        """The prompt, as text."""
        if output.prompt is not None:
            return output.prompt
        skip = self._request.skip_special_tokens is not False
        return self._engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip)


class _ChoiceEncoder:
    """Builds one choice, at once or piece by piece."""

    def __init__(self, call: CompletionHandler, index: int) -> None:
        request = call._request
        self._call = call
        self._index = index
        self._echo = bool(request.echo)
        self.is_first = True
        self._return_token_ids = bool(request.return_token_ids)
        self._logprobs = (
            None if request.logprobs is None else CompletionLogprobs(call._token_formatter, request.logprobs)
        )
        with_logprobs = request.logprobs is not None or request.prompt_logprobs is not None
        self._plain = not (self._echo or self._return_token_ids or with_logprobs)
        self._before = b'{"index":%d,"text":' % index

    def encode_next(self, output: RequestOutput, sequence: CompletionOutput) -> bytes:
        """The next piece, encoded; empty where nothing in it would be new."""
        if self._plain and sequence.finish_reason is None:
            if not sequence.text:
                return b""
            return (
                self._before + encode_json(sequence.text) + b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
            )
        return encode_json(self.build(output, sequence))

    def build(self, output: RequestOutput, sequence: CompletionOutput) -> dict[str, Any]:
        """The choice, or its next piece. The first one has what is echoed."""
        text, token_ids, positions = sequence.text, sequence.token_ids, sequence.logprobs or []
        if self._call._is_prompt_only:
            text, token_ids, positions = "", [], []
        first, self.is_first = self.is_first, False
        choice: dict[str, Any] = {
            "index": self._index,
            "text": (self._call.prompt_text(output) if self._echo and first else "") + text,
            "logprobs": None,
            "finish_reason": "length" if self._call._is_prompt_only else sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        if self._logprobs is not None:
            if self._echo and first:
                prompt_ids, prompt_positions = output.prompt_token_ids, output.prompt_logprobs or []
                choice["logprobs"] = self._logprobs.format_next(
                    [*prompt_ids, *token_ids], [*prompt_positions, *positions]
                )
            else:
                choice["logprobs"] = self._logprobs.format_next(token_ids, positions)
        if self._call._request.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        if self._return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        return choice


def _prompts(prompt: str | list[str | int | list[int]] | None) -> Sequence[str | list[int]]:
    """One or several prompts; a list of numbers is one.

    Raises:
        RequestError: There is none, or they are of different kinds.
    """
    if prompt is None:
        raise RequestError("prompt is missing.", parameter="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list.", parameter="prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    if kinds in ({str}, {list}):
        return cast("list[str | list[int]]", prompt)
    raise RequestError(
        "prompt must be a text, a list of texts, a list of token ids or a list of those; its entries are of several "
        "kinds.",
        parameter="prompt",
    )
