"""mvllm: a hardware-neutral inference engine for large language models.

`import mvllm` has no side effects: names are resolved on first use, so neither torch nor a platform plugin is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mvllm.version import __version__

if TYPE_CHECKING:
    from mvllm.config.engine_args import EngineArgs
    from mvllm.engine.async_llm import AsyncLLM
    from mvllm.engine.frontend.outputs import BeamSearchOutput, CompletionOutput, Logprob, RequestOutput
    from mvllm.engine.frontend.pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from mvllm.engine.llm_engine import LLMEngine
    from mvllm.entrypoints.llm import LLM
    from mvllm.errors import ConfigError, ModelError, MvllmError, PlatformError, RequestError
    from mvllm.messages.beam_search_params import BeamSearchParams
    from mvllm.messages.inputs import TextPrompt, TokensPrompt
    from mvllm.messages.lora import LoRARequest
    from mvllm.messages.pooling_params import PoolingParams
    from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams
    from mvllm.messages.structured_outputs import StructuredOutputsParams

_EXPORTS = {
    "LLM": "mvllm.entrypoints.llm",
    "LLMEngine": "mvllm.engine.llm_engine",
    "AsyncLLM": "mvllm.engine.async_llm",
    "EngineArgs": "mvllm.config.engine_args",
    "LoRARequest": "mvllm.messages.lora",
    "SamplingParams": "mvllm.messages.sampling_params",
    "RequestOutputKind": "mvllm.messages.sampling_params",
    "BeamSearchParams": "mvllm.messages.beam_search_params",
    "BeamSearchOutput": "mvllm.engine.frontend.outputs",
    "PoolingParams": "mvllm.messages.pooling_params",
    "PoolingRequestOutput": "mvllm.engine.frontend.pooling_outputs",
    "EmbeddingRequestOutput": "mvllm.engine.frontend.pooling_outputs",
    "ClassificationRequestOutput": "mvllm.engine.frontend.pooling_outputs",
    "ScoringRequestOutput": "mvllm.engine.frontend.pooling_outputs",
    "StructuredOutputsParams": "mvllm.messages.structured_outputs",
    "TextPrompt": "mvllm.messages.inputs",
    "TokensPrompt": "mvllm.messages.inputs",
    "RequestOutput": "mvllm.engine.frontend.outputs",
    "CompletionOutput": "mvllm.engine.frontend.outputs",
    "Logprob": "mvllm.engine.frontend.outputs",
    "MvllmError": "mvllm.errors",
    "RequestError": "mvllm.errors",
    "ConfigError": "mvllm.errors",
    "ModelError": "mvllm.errors",
    "PlatformError": "mvllm.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
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
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'mvllm' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
