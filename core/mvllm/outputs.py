"""Public names of the outputs of requests."""

from typing import TYPE_CHECKING

from mvllm.engine.frontend.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestOutput,
)
from mvllm.engine.frontend.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

if TYPE_CHECKING:
    from mvllm.images import GeneratedImage as GeneratedImage
    from mvllm.images import ImageRequestOutput as ImageRequestOutput

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]


def __getattr__(name: str) -> object:
    if name not in ("GeneratedImage", "ImageRequestOutput"):
        raise AttributeError(f"module 'mvllm.outputs' has no attribute {name!r}")
    import mvllm.images  # of a package that need not be installed

    return getattr(mvllm.images, name)
