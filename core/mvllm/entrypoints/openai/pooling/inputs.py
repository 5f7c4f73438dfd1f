"""Requests for embeddings, pooling, classification, scores and ranks: many inputs, one response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mvllm.engine.frontend.pooling_outputs import PoolingRequestOutput
from mvllm.entrypoints.openai.common.errors import to_api_error
from mvllm.entrypoints.openai.common.handler import RequestHandler
from mvllm.entrypoints.openai.common.json_response import encode_json
from mvllm.entrypoints.openai.common.prompt_inputs import build_prompts, split_prompts
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.protocol import InputListRequest
from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType
from mvllm.messages.pooling_params import PoolingParams

MAX_INPUTS = 2048
"""Inputs of one request: each is a request of the engine."""

_MAX_INLINE_VALUES = 1 << 15
"""Numbers that are encoded in the event loop; more are encoded in a thread."""


class PoolingInputs(Protocol):
    """The inputs of one request.

    Attributes:
        field: Their name in the request, for errors.
    """

    field: str

    async def build(self, context: ServingContext) -> tuple[Sequence[PromptType], Sequence[PoolingParams]]:
        """The prompts, and the pooling parameters of each.

        Raises:
            RequestError: An input is not acceptable.
        """


class PoolingRequestHandler(RequestHandler):
    """Answers a request with the model's outputs for a list of inputs.

    Args:
        context, model, id_prefix, priority: As for RequestHandler.
        inputs: The inputs.
        encode: The body of the response, from this handler and the outputs of all inputs. May run in a thread.
    """

    def __init__(
        self,
        context: ServingContext,
        model: str,
        id_prefix: str,
        priority: int | None,
        inputs: PoolingInputs,
        encode: Callable[[PoolingRequestHandler, Sequence[PoolingRequestOutput]], bytes],
    ) -> None:
        super().__init__(context, model, id_prefix, priority)
        self._inputs = inputs
        self._encode = encode

    async def start(self) -> None:
        """Adds the inputs to the engine. See Handler."""
        try:
            await super().start()
        except RequestError as e:
            if e.parameter not in ("prompt", "multi_modal_data"):
                raise
            error = to_api_error(e)
            error.param = self._inputs.field
            try:
                raise error from e
            finally:
                del error  # it refers to this frame, which would live with all features until garbage collection

    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], Sequence[PoolingParams]]:
        return await self._inputs.build(self._context)

    async def full_response(self) -> bytes:
        """The body of the response. See Handler.

        Raises:
            UnavailableError: An input was aborted.
        """
        outputs = [PoolingRequestOutput.from_request_output(each) for each in await self._engine_requests.collect()]
        if sum(output.outputs.data.size for output in outputs) <= _MAX_INLINE_VALUES:
            return self._encode(self, outputs)
        return await self._context.tokenizer_pool.run(lambda: self._encode(self, outputs))

    def encode_list(self, data: Sequence[Any], outputs: Sequence[PoolingRequestOutput]) -> bytes:
        """The body of a response with one entry of `data` for each input."""
        return encode_json({**self._common_fields("list"), "data": data, "usage": pooling_usage(outputs)})

    def encode_results(self, results: Sequence[Any], outputs: Sequence[PoolingRequestOutput]) -> bytes:
        """The body of a response in Cohere's format, with any number of `results`."""
        return encode_json({"id": self._id, "model": self._model, "usage": pooling_usage(outputs), "results": results})


class InputList:
    """Inputs that have the same parameters: texts or token ids, or one conversation.

    Args:
        request: The request that has them.
        params: Their pooling parameters.
        field: Their name in the request, for errors.

    Attributes:
        params: See Args.
    """

    def __init__(self, request: InputListRequest, params: PoolingParams, field: str = "input") -> None:
        self._request = request
        self.params = params
        self.field = field

    async def build(self, context: ServingContext) -> tuple[Sequence[PromptType], Sequence[PoolingParams]]:
        """See PoolingInputs."""
        request = self._request
        if request.messages is not None:
            return [await self._build_conversation(context)], [self.params]
        if request.input == []:  # the vectors of no inputs
            return [], []
        prompts = await build_prompts(
            context.tokenizer_pool,
            check_num_inputs(split_prompts(request.input, self.field), self.field),
            add_special_tokens=request.add_special_tokens,
            cache_salt=request.cache_salt,
        )
        return prompts, [self.params] * len(prompts)

    async def _build_conversation(self, context: ServingContext) -> PromptType:
        """The prompt of `messages`."""
        request = self._request
        self.field = "messages"
        if request.input is not None:
            raise RequestError("Send either input or messages.", parameter="messages")
        prompt = await context.prompt_renderer.render_for_pooling(request)
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        return prompt


def check_num_inputs(inputs: Sequence[Any], field: str) -> Sequence[Any]:
    """Returns `inputs` after a check of their number.

    Raises:
        RequestError: There are too many.
    """
    if len(inputs) > MAX_INPUTS:
        raise RequestError(
            f"One request may have {MAX_INPUTS} inputs; this one has {len(inputs)}. Send several requests.",
            parameter=field,
        )
    return inputs


def pooling_usage(outputs: Sequence[PoolingRequestOutput]) -> dict[str, int]:
    """The `usage` object: the tokens of the prompts."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
