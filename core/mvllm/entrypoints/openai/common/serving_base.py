"""Base classes of request handlers: one HTTP request, run by the engine, and its response.

Handler                      what routes run                                 plugins/responses
└─ RequestHandler            its requests to the engine                      pooling/serving_base.py
   └─ GenerationHandler      sampling parameters, usage                      chat/serving_base.py
      └─ ChoicesHandler      response and stream of `choices`                chat/serving.py, completions/serving.py
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import msgspec

from mvllm.engine.frontend.outputs import CompletionOutput, RequestOutput
from mvllm.entrypoints.openai.common.engine_requests import EngineRequests
from mvllm.entrypoints.openai.common.errors import to_api_error
from mvllm.entrypoints.openai.common.logprobs import TokenFormatter
from mvllm.entrypoints.openai.common.output_constraint import OutputConstraint
from mvllm.entrypoints.openai.common.server_sent_events import ChunkEncoder, error_event
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.streaming_response import SERVER_SENT_EVENTS, RequestConnection, StreamFormat
from mvllm.entrypoints.openai.common.usage import UsageCounter
from mvllm.entrypoints.openai.protocol import GenerationRequest, StreamOptions
from mvllm.messages.inputs import PromptType
from mvllm.messages.lora import LoRARequest
from mvllm.messages.pooling_params import PoolingParams
from mvllm.messages.sampling_params import SamplingParams


class Handler(ABC):
    """Answers one HTTP request: `start`, then `full_response` or `stream`, and `close` however it ends.

    Attributes:
        lora_request: The LoRA adapter that the request names, to be set before `start`.
        is_streaming: Whether the response is to be streamed.
        relaxations: Once it has started: what of a JSON schema is not enforced while the output is generated.
    """

    lora_request: LoRARequest | None = None
    is_streaming = False
    relaxations: tuple[str, ...] = ()

    @abstractmethod
    async def start(self) -> None:
        """Adds the request's prompts to the engine.

        Raises:
            RequestError: The request is not acceptable.
            UnavailableError, EngineDeadError: The engine does not accept requests.
        """

    @abstractmethod
    def close(self) -> None:
        """Aborts what has not finished in the engine. Idempotent."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens of its prompts and of what was generated so far."""

    @abstractmethod
    async def full_response(self) -> bytes:
        """The body of the response, when all of it is there.

        Raises:
            APIError: A sequence failed in the engine.
            EngineDeadError: The engine has stopped.
        """


class StreamingHandler(Handler):
    """A handler whose response can be streamed.

    Attributes:
        stream_format: Format of what `stream` yields.
        connection: The connection of the request, if `stream` may write parts to it while its caller waits for more.
    """

    stream_format: ClassVar[StreamFormat] = SERVER_SENT_EVENTS
    connection: RequestConnection | None = None

    @abstractmethod
    def stream(self) -> AsyncGenerator[bytes, None]:
        """The response part by part, in `stream_format`. An error while it is generated is a part, too."""


class RequestHandler(Handler):
    """Answers a request with the outputs of prompts that it adds to the engine.

    Args:
        context: The engine, and what handlers share.
        model: The model's name in the response.
        id_prefix: Beginning of the response's id.
        priority: The request's; None is 0.
    """

    _constraint: OutputConstraint | None = None

    def __init__(self, context: ServingContext, model: str, id_prefix: str, priority: int | None) -> None:
        self._context = context
        self._engine = context.engine
        self._model = model
        self._priority = priority or 0
        self._id = f"{id_prefix}{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._started: EngineRequests | None = None

    async def start(self) -> None:
        """Adds the request's prompts to the engine. See Handler."""
        prompts, params = await self._build_engine_inputs()
        self._started = await EngineRequests.start(
            self._engine, self._id, prompts, params, self._priority, self._constraint, self.lora_request
        )
        self.relaxations = self._started.relaxations

    def close(self) -> None:
        """Aborts what has not finished in the engine. Idempotent."""
        if self._started is not None:
            self._started.close()

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompts and of what was generated so far."""
        return 0 if self._started is None else self._started.num_tokens

    @abstractmethod
    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], SamplingParams | Sequence[PoolingParams]]:
        """The prompts, and the sampling parameters of all or the pooling parameters of each.

        Raises:
            RequestError: The request is not acceptable.
        """

    def _common_fields(self, object_type: str) -> dict[str, Any]:
        """The first fields of a response."""
        return {"id": self._id, "object": object_type, "created": self._created, "model": self._model}

    @property
    def _engine_requests(self) -> EngineRequests:
        assert self._started is not None, "start() comes first"
        return self._started


class GenerationHandler(RequestHandler, StreamingHandler):
    """Answers a request that generates text.

    Args:
        context, model, id_prefix: As for RequestHandler.
        request: The body of the HTTP request.
        params: Sampling parameters.
        constraint: Structured output that the request asks for.
    """

    def __init__(
        self,
        context: ServingContext,
        model: str,
        id_prefix: str,
        request: GenerationRequest,
        params: SamplingParams,
        constraint: OutputConstraint | None,
    ) -> None:
        super().__init__(context, model, id_prefix, request.priority)
        self.is_streaming = bool(request.stream)
        self._request = request
        self._params = params
        self._constraint = constraint
        self._usage = UsageCounter()

    @abstractmethod
    async def _build_prompts(self) -> Sequence[PromptType]:
        """The prompts.

        Raises:
            RequestError: The request is not acceptable.
        """

    @property
    def warning_fields(self) -> dict[str, Any]:
        """The response's `warnings`, if its JSON schema was not enforced whole."""
        warnings = None if self._started is None else self._started.warnings
        return {} if warnings is None else {"warnings": warnings}

    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], SamplingParams]:
        prompts = await self._build_prompts()
        return prompts, self._params  # _build_prompts may replace them


NULL_RESPONSE_FIELDS = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}
"""Fields of a whole response with choices that are null unless they are set. Clients of other engines read them."""

ChoiceEncoder = Callable[[RequestOutput, CompletionOutput], bytes]
"""Encodes the chunks of one choice, output by output. Empty for an output that adds nothing."""


class ChoicesHandler(GenerationHandler):
    """Answers a request with a list of `choices`: one for each sequence of each prompt.

    Attributes:
        chunk_object: The `object` field of a stream's chunks.
    """

    chunk_object: ClassVar[str]
    _decodes_tokens = False
    """Whether `_encode_response` decodes tokens of the output."""

    @cached_property
    def token_formatter(self) -> TokenFormatter:
        """Formats the tokens of log-probabilities."""
        return TokenFormatter(
            self._engine.tokenizer,
            as_ids=bool(self._request.return_tokens_as_token_ids),
            skip_special=self._params.skip_special_tokens,
        )

    async def full_response(self) -> bytes:
        """The body of the response. See RequestHandler."""
        outputs = await self._engine_requests.collect()
        for position, output in enumerate(outputs):
            self._usage.add(position, output)
        if self._params.prompt_logprobs is None and not self._decodes_tokens:
            return self._encode_response(outputs)
        return await self._context.tokenizer_pool.run(lambda: self._encode_response(outputs))  # may take long

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. See GenerationHandler."""
        requests = self._engine_requests
        options = self._request.stream_options
        if self._context.force_include_usage:
            options = msgspec.structs.replace(options or StreamOptions(), include_usage=True)
        chunks = ChunkEncoder(self._common_fields(self.chunk_object), self._usage, options)
        encoders: dict[int, ChoiceEncoder] = {}
        run_in_thread = self._context.tokenizer_pool.run  # for the log-probabilities of a prompt, which may be many
        num_sequences = self._params.n
        num_open = requests.num_prompts
        written = b""

        def write_now(output: RequestOutput) -> bool:
            """Writes the chunks of an output past the task and the layers above it, unless something is special."""
            nonlocal written
            write = self.connection.write_chunk if self.connection is not None else None
            if write is None or output.prompt_logprobs:
                return False
            for sequence in output.outputs:
                if sequence.finish_reason is not None or sequence.index not in encoders:
                    return False
            self._usage.add_prompt(0, output)
            for sequence in output.outputs:
                self._usage.add_completion(sequence)
                written += encoders[sequence.index](output, sequence)
            if written:
                write(written)
                written = b""
            return True

        if self.connection is not None:
            requests.set_consumer(write_now)
        try:
            async for position, output in requests.outputs():
                self._usage.add_prompt(position, output)
                for sequence in output.outputs:
                    self._usage.add_completion(sequence)
                    if output.finished and sequence is output.outputs[-1]:
                        transfer = self._kv_transfer_fields([output]) if position == 0 else {}
                        chunks.end_fields = {**transfer, **(self.warning_fields if num_open == 1 else {})}
                    index = position * num_sequences + sequence.index
                    encode = encoders.get(index)
                    if encode is not None:
                        written += encode(output, sequence)
                    else:
                        encode = encoders[index] = self._make_choice_encoder(index, chunks)
                        first = partial(encode, output, sequence)
                        written += await run_in_thread(first) if output.prompt_logprobs else first()
                    if sequence.finish_reason == "error":
                        raise requests.error_of(sequence)
                num_open -= output.finished
                chunks.end_fields = {}
                if written and num_open:  # the last chunks are sent with the stream's end
                    yield written
                    written = b""
        except Exception as e:  # noqa: BLE001  (to_api_error logs what the client does not see)
            yield written + error_event(to_api_error(e))
            return
        yield written + chunks.encode_end()

    @staticmethod
    def _kv_transfer_fields(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response's `kv_transfer_params`, if another engine may fetch the blocks of the (first) prompt."""
        params = outputs[0].kv_transfer_params
        return {} if params is None else {"kv_transfer_params": params}

    def _end_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The last fields of a response: what may be missing."""
        return {**self._kv_transfer_fields(outputs), **self.warning_fields}

    @abstractmethod
    def _encode_response(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The body of the response to finished prompts. May run in a thread."""

    @abstractmethod
    def _make_choice_encoder(self, index: int, chunks: ChunkEncoder) -> ChoiceEncoder:
        """A new encoder for one choice of a stream."""
