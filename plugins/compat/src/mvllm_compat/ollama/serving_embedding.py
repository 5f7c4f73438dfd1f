"""`POST /api/embed` and `/api/embeddings`: embeddings of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mvllm.extension_api.http import (
    EmbeddingRequest,
    InputListHandler,
    PoolingParams,
    PoolingRequestOutput,
    PoolingTask,
    ServingContext,
    encode_json,
    pooling_usage,
)
from mvllm_compat.ollama.durations import RequestDurations
from mvllm_compat.ollama.protocol import OllamaEmbeddingsRequest, OllamaEmbedRequest


class OllamaEmbedHandler(InputListHandler[EmbeddingRequest]):
    """Answers one request to `/api/embed`: a vector of length 1 for each input."""

    id_prefix = "ollama-"

    def __init__(self, context: ServingContext, model: str, request: OllamaEmbedRequest) -> None:
        super().__init__(context, request.model or model, None)
        self.durations = RequestDurations()
        inputs: Any = request.input
        self._request = EmbeddingRequest(input=inputs)
        self._params = PoolingParams(
            dimensions=request.dimensions,
            normalize=True,
            truncate_prompt_tokens=None if request.truncate is False else -1,
            task=PoolingTask.EMBED,
        )

    async def start(self) -> None:
        """See RequestHandler."""
        self.durations.note_loaded()
        await super().start()

    def _encode_response(self, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        return encode_json(
            {
                "model": self._model,
                "embeddings": [msgspec.Raw(encode_json(output.outputs.data.tolist())) for output in outputs],
                **self.durations.fields(),
                "prompt_eval_count": pooling_usage(outputs)["prompt_tokens"],
            }
        )


class OllamaEmbeddingsHandler(InputListHandler[EmbeddingRequest]):
    """Answers one request to `/api/embeddings`: the vector of one input as it is pooled, not scaled."""

    id_prefix = "ollama-"
    field = "prompt"

    def __init__(self, context: ServingContext, model: str, request: OllamaEmbeddingsRequest) -> None:
        super().__init__(context, request.model or model, None)
        self._request = EmbeddingRequest(input=request.prompt)
        self._params = PoolingParams(normalize=False, truncate_prompt_tokens=-1, task=PoolingTask.EMBED)

    def _encode_response(self, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        [output] = outputs
        return encode_json({"embedding": output.outputs.data.tolist()})
