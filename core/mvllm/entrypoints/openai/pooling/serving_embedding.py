"""`POST /v1/embeddings` and `POST /pooling`: embeddings of inputs, or of their tokens, or scores."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec

from mvllm.engine.frontend.pooling_outputs import PoolingRequestOutput
from mvllm.entrypoints.openai.common.json_response import encode_json
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.pooling.serving_base import InputListHandler
from mvllm.entrypoints.openai.protocol import EmbeddingRequest, PoolingRequest
from mvllm.errors import RequestError
from mvllm.messages.pooling_params import PoolingParams, PoolingTask, PoolingType


class EmbeddingHandler(InputListHandler[EmbeddingRequest]):
    """Answers one embedding request."""

    id_prefix = "embd-"

    def __init__(self, context: ServingContext, model: str, request: EmbeddingRequest) -> None:
        super().__init__(context, model, request.priority)
        _check_format(request)
        self._request = request
        self._params = PoolingParams(
            dimensions=request.dimensions,
            normalize=request.normalize,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            task=PoolingTask.EMBED,
        )

    def _encode_response(self, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        data: list[msgspec.Raw] = []
        for index, output in enumerate(outputs):  # one at a time, so that other threads can run in between
            values = _encode_values(output, self._request.encoding_format)
            data.append(msgspec.Raw(encode_json({"object": "embedding", "index": index, "embedding": values})))
        return self._encode_list(data, outputs)


class PoolingHandler(InputListHandler[PoolingRequest]):
    """Answers one pooling request: an embedding of each input or of each token, or scores."""

    id_prefix = "pool-"

    def __init__(self, context: ServingContext, model: str, request: PoolingRequest) -> None:
        super().__init__(context, model, request.priority)
        _check_format(request)
        self._request = request
        pooling_type: Any = request.pooling_type
        task: Any = request.task
        if task == "token_embed":  # another name of pooling_type all
            pooling_type, task = pooling_type or PoolingType.ALL, PoolingTask.EMBED
        self._params = PoolingParams(
            pooling_type=pooling_type,
            dimensions=request.dimensions,
            normalize=request.normalize,
            use_activation=request.use_activation,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            task=task,
        )

    def _encode_response(self, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        data: list[msgspec.Raw] = []
        for index, output in enumerate(outputs):
            values = _encode_values(output, self._request.encoding_format)
            data.append(msgspec.Raw(encode_json({"object": "pooling", "index": index, "data": values})))
        return self._encode_list(data, outputs)


def _check_format(request: EmbeddingRequest | PoolingRequest) -> None:
    if request.encoding_format not in (None, "float", "base64"):
        raise RequestError("encoding_format must be 'float' or 'base64'.", parameter="encoding_format")


def _encode_values(output: PoolingRequestOutput, encoding_format: str | None) -> Any:
    """A list of numbers, or base64 of the bytes of little-endian float32."""
    data = output.outputs.data
    return base64.b64encode(data.tobytes()).decode() if encoding_format == "base64" else data.tolist()
