"""`POST /api/embed` and `/api/embeddings`: embeddings of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mvllm.extension_api.http import (
    EmbeddingRequest,
    InputList,
    PoolingParams,
    PoolingRequestHandler,
    PoolingRequestOutput,
    PoolingTask,
    ServingContext,
    encode_json,
    pooling_usage,
)
from mvllm_compat.ollama.durations import RequestDurations
from mvllm_compat.ollama.protocol import OllamaEmbeddingsRequest, OllamaEmbedRequest


class OllamaEmbedHandler(PoolingRequestHandler):
    """Answers one request to `/api/embed`: a vector of length 1 for each input."""

    def __init__(self, context: ServingContext, model: str, request: OllamaEmbedRequest) -> None:
        inputs: Any = request.input
        params = PoolingParams(
            dimensions=request.dimensions,
            normalize=True,
            truncate_prompt_tokens=None if request.truncate is False else -1,
            task=PoolingTask.EMBED,
        )
        name, durations = request.model or model, RequestDurations()

        def encode(_: PoolingRequestHandler, outputs: Sequence[PoolingRequestOutput]) -> bytes:
            return encode_json(
                {
                    "model": name,
                    "embeddings": [msgspec.Raw(encode_json(output.outputs.data.tolist())) for output in outputs],
                    **durations.fields(),
                    "prompt_eval_count": pooling_usage(outputs)["prompt_tokens"],
                }
            )

        self.durations = durations
        super().__init__(context, model, "ollama-", None, InputList(EmbeddingRequest(input=inputs), params), encode)

    async def start(self) -> None:
        """See Handler."""
        self.durations.note_loaded()
        await super().start()


def ollama_embeddings_handler(
    context: ServingContext, model: str, request: OllamaEmbeddingsRequest
) -> PoolingRequestHandler:
    """The handler of one request to `/api/embeddings`: the vector of one input as it is pooled, not scaled."""
    params = PoolingParams(normalize=False, truncate_prompt_tokens=-1, task=PoolingTask.EMBED)
    inputs = InputList(EmbeddingRequest(input=request.prompt), params, field="prompt")

    def encode(_: PoolingRequestHandler, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        [output] = outputs
        return encode_json({"embedding": output.outputs.data.tolist()})

    return PoolingRequestHandler(context, model, "ollama-", None, inputs, encode)
