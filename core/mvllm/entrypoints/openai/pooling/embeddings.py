"""`POST /v1/embeddings` and `POST /pooling`: embeddings of inputs, or of their tokens, or scores."""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mvllm.engine.frontend.pooling_outputs import PoolingRequestOutput
from mvllm.entrypoints.openai.common.json_response import encode_json
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.pooling.inputs import InputList, PoolingRequestHandler
from mvllm.entrypoints.openai.protocol import EmbeddingRequest, PoolingRequest
from mvllm.errors import RequestError
from mvllm.messages.pooling_params import PoolingParams, PoolingTask, PoolingType


def embedding_handler(context: ServingContext, model: str, request: EmbeddingRequest) -> PoolingRequestHandler:
    """The handler of one embedding request.

    Raises:
        RequestError: A setting is not valid.
    """
    _check_format(request)
    params = PoolingParams(
        dimensions=request.dimensions,
        normalize=request.use_activation if request.normalize is None else request.normalize,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        task=PoolingTask.EMBED,
    )

    def encode(handler: PoolingRequestHandler, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        return handler.encode_list(_encode_entries(outputs, request, "embedding", "embedding"), outputs)

    return PoolingRequestHandler(context, model, "embd-", request.priority, InputList(request, params), encode)


def pooling_handler(context: ServingContext, model: str, request: PoolingRequest) -> PoolingRequestHandler:
    """The handler of one pooling request: an embedding of each input or of each token, or scores.

    Raises:
        RequestError: A setting is not valid.
    """
    _check_format(request)
    pooling_type: Any = request.pooling_type
    task: Any = request.task
    if task == "token_embed":  # another name of pooling_type all
        pooling_type, task = pooling_type or PoolingType.ALL, PoolingTask.EMBED
    normalize, use_activation = request.normalize, request.use_activation
    if not context.engine.pooling_input_processor.num_labels:  # of embeddings it is the normalization
        normalize, use_activation = use_activation if normalize is None else normalize, None
    params = PoolingParams(
        pooling_type=pooling_type,
        dimensions=request.dimensions,
        normalize=normalize,
        use_activation=use_activation,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        task=task,
    )

    def encode(handler: PoolingRequestHandler, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        return handler.encode_list(_encode_entries(outputs, request, "pooling", "data"), outputs)

    return PoolingRequestHandler(context, model, "pool-", request.priority, InputList(request, params), encode)


_FORMATS = {
    "encoding_format": ("float", "base64"),
    "embed_dtype": ("float32", "float16", "bfloat16"),
    "endianness": ("little", "big", "native"),
}


def _check_format(request: EmbeddingRequest) -> None:
    for name, allowed in _FORMATS.items():
        if getattr(request, name) not in (None, *allowed):
            raise RequestError(f"{name} must be one of {', '.join(allowed)}.", parameter=name)


def _encode_entries(
    outputs: Sequence[PoolingRequestOutput], request: EmbeddingRequest, object_type: str, field: str
) -> list[msgspec.Raw]:
    """An object for each output, encoded one at a time, so that other threads can run in between.

    Args:
        field: The name of the values.
    """
    return [
        msgspec.Raw(encode_json({"object": object_type, "index": index, field: _encode_values(output, request)}))
        for index, output in enumerate(outputs)
    ]


def _encode_values(output: PoolingRequestOutput, request: EmbeddingRequest) -> Any:
    """A list of numbers, or base64 of their bytes: by default of little-endian float32."""
    data = output.outputs.data
    if request.encoding_format != "base64":
        return data.tolist()
    order = ">" if request.endianness == "big" or (request.endianness == "native" and sys.byteorder == "big") else "<"
    if request.embed_dtype == "bfloat16":  # the upper half of float32, rounded to even
        bits = np.ascontiguousarray(data, np.float32).view(np.uint32).astype(np.uint64)
        data = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(f"{order}u2")
    else:
        data = data.astype(f"{order}f{2 if request.embed_dtype == 'float16' else 4}")
    return base64.b64encode(data.tobytes()).decode()
