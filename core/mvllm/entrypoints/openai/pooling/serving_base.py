"""Base of the handlers of embeddings, pooling, classification, scores and ranks: many inputs, one response."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from mvllm.engine.frontend.pooling_outputs import PoolingRequestOutput
from mvllm.entrypoints.openai.common.errors import to_api_error
from mvllm.entrypoints.openai.common.json_response import encode_json
from mvllm.entrypoints.openai.common.prompt_inputs import build_prompts, split_prompts
from mvllm.entrypoints.openai.common.serving_base import RequestHandler
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.protocol import InputListRequest
from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType
from mvllm.messages.pooling_params import PoolingParams

MAX_INPUTS = 2048
"""Inputs of one request: each is a request of the engine."""

_MAX_INLINE_VALUES = 1 << 15
"""Numbers that are encoded in the event loop; more are encoded in a thread."""


class BasePoolingHandler(RequestHandler):
    """Answers a request with the model's outputs for a list of inputs.

    Subclasses are created from context, model and body, and raise RequestError if a setting is not valid.

    Args:
        context, model, priority: As for RequestHandler.

    Attributes:
        id_prefix: Beginning of the response's id.
        field: Name of the inputs in the request, for errors.
    """

    id_prefix: ClassVar[str]
    field = "input"

    def __init__(self, context: ServingContext, model: str, priority: int | None) -> None:
        super().__init__(context, model, self.id_prefix, priority)

    async def start(self) -> None:
        """Adds the inputs to the engine. See RequestHandler."""
        try:
            await super().start()
        except RequestError as e:
            if e.parameter not in ("prompt", "multi_modal_data"):
                raise
            error = to_api_error(e)
            error.param = self.field
            try:
                raise error from e
            finally:
                del error  # it refers to this frame, which would live with all features until garbage collection

    async def full_response(self) -> bytes:
        """The body of the response. See RequestHandler.

        Raises:
            UnavailableError: An input was aborted.
        """
        outputs = [PoolingRequestOutput.from_request_output(each) for each in await self._engine_requests.collect()]
        if sum(output.outputs.data.size for output in outputs) <= _MAX_INLINE_VALUES:
            return self._encode_response(outputs)
        return await self._context.tokenizer_pool.run(lambda: self._encode_response(outputs))

    @abstractmethod
    def _encode_response(self, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        """The body of the response. May run in a thread."""

    def _encode_list(self, data: Sequence[Any], outputs: Sequence[PoolingRequestOutput]) -> bytes:
        """The body of a response with one entry of `data` for each input."""
        return encode_json({**self._common_fields("list"), "data": data, "usage": pooling_usage(outputs)})


_Request = TypeVar("_Request", bound=InputListRequest)


class InputListHandler(BasePoolingHandler, Generic[_Request]):
    """Answers a request whose inputs, texts or token ids, have the same parameters, or which has one conversation.

    Subclasses set both attributes.
    """

    _request: _Request
    _params: PoolingParams

    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], Sequence[PoolingParams]]:
        request = self._request
        if request.messages is not None:
            return [await self._build_conversation(request)], [self._params]
        if request.input == []:  # the vectors of no inputs
            return [], []
        prompts = await build_prompts(
            self._context.tokenizer_pool,
            check_num_inputs(split_prompts(request.input, self.field), self.field),
            add_special_tokens=request.add_special_tokens,
            cache_salt=request.cache_salt,
        )
        return prompts, [self._params] * len(prompts)

    async def _build_conversation(self, request: InputListRequest) -> PromptType:
        """The prompt of `messages`."""
        self.field = "messages"
        if request.input is not None:
            raise RequestError("Send either input or messages.", parameter="messages")
        prompt = await self._context.prompt_renderer.render_for_pooling(request)
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
