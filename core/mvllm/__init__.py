"""mvllm: a hardware-neutral inference engine for large language models.

`import mvllm` has no side effects: names are resolved on first use, so neither torch nor a platform plugin is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mvllm.version import __version__

if TYPE_CHECKING:
    from mvllm.config.engine_args import AsyncEngineArgs, EngineArgs
    from mvllm.distributed.weight_transfer import WeightTransferGroup
    from mvllm.engine.async_llm import AsyncLLM
    from mvllm.engine.async_llm_engine import AsyncLLMEngine
    from mvllm.engine.frontend.outputs import BeamSearchOutput, CompletionOutput, Logprob, RequestOutput
    from mvllm.engine.frontend.pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from mvllm.engine.llm_engine import LLMEngine
    from mvllm.entrypoints.llm import LLM
    from mvllm.errors import ConfigError, ModelError, MvllmError, PlatformError, RequestError, RequestFailedError
    from mvllm.images import GeneratedImage as GeneratedImage
    from mvllm.images import ImageParams as ImageParams
    from mvllm.images import ImageRequestOutput as ImageRequestOutput
    from mvllm.messages.beam_search_params import BeamSearchParams
    from mvllm.messages.inputs import TextPrompt, TokensPrompt
    from mvllm.messages.lora import LoRARequest
    from mvllm.messages.pooling_params import PoolingParams
    from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams
    from mvllm.messages.structured_outputs import StructuredOutputsParams
    from mvllm.messages.weights import WeightTransferInfo
    from mvllm.models.shared_memory_weights import SharedMemoryWeights

_NAMES = {
    "mvllm.config.engine_args": "AsyncEngineArgs EngineArgs",
    "mvllm.distributed.weight_transfer": "WeightTransferGroup",
    "mvllm.engine.async_llm": "AsyncLLM",
    "mvllm.engine.async_llm_engine": "AsyncLLMEngine",
    "mvllm.engine.frontend.outputs": "BeamSearchOutput CompletionOutput Logprob RequestOutput",
    "mvllm.engine.frontend.pooling_outputs": (
        "ClassificationRequestOutput EmbeddingRequestOutput PoolingRequestOutput ScoringRequestOutput"
    ),
    "mvllm.engine.llm_engine": "LLMEngine",
    "mvllm.entrypoints.llm": "LLM",
    "mvllm.errors": "ConfigError ModelError MvllmError PlatformError RequestError RequestFailedError",
    "mvllm.images": "GeneratedImage ImageParams ImageRequestOutput",
    "mvllm.messages.beam_search_params": "BeamSearchParams",
    "mvllm.messages.inputs": "TextPrompt TokensPrompt",
    "mvllm.messages.lora": "LoRARequest",
    "mvllm.messages.pooling_params": "PoolingParams",
    "mvllm.messages.sampling_params": "RequestOutputKind SamplingParams",
    "mvllm.messages.structured_outputs": "StructuredOutputsParams",
    "mvllm.messages.weights": "WeightTransferInfo",
    "mvllm.models.shared_memory_weights": "SharedMemoryWeights",
}
"""Public names by the module that defines them."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "ModelError",
    "MvllmError",
    "PlatformError",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestError",
    "RequestFailedError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "SharedMemoryWeights",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WeightTransferGroup",
    "WeightTransferInfo",
    "__version__",
]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'mvllm' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
