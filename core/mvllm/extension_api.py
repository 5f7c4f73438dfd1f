"""All that plugins other than platforms may import from mvllm: models, executors, parsers, loggers, commands, ...

Unlike `mvllm.plugin_api`, this surface has no contract version: what stands here follows the engine and may change with
every minor version of mvllm, so a package that uses it states a range (`mvllm>=0.1,<0.2`). Everything is resolved on
first use; importing this module loads neither torch nor the engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mvllm.config.engine_config import EngineConfig
    from mvllm.config.hf_config import HFConfig
    from mvllm.config.model import ModelConfig
    from mvllm.config.rope_parameters import RopeParameters
    from mvllm.engine.outputs import RequestOutput
    from mvllm.engine.stat_loggers import StatLogger
    from mvllm.entrypoints.openai.errors import APIError
    from mvllm.entrypoints.openai.http_plugins import HTTPServerHandle
    from mvllm.entrypoints.parsers.interface import (
        ContentDelta,
        Delta,
        ReasoningDelta,
        ReasoningParser,
        ReasoningStream,
        ToolCallDelta,
        ToolParser,
        ToolStream,
    )
    from mvllm.entrypoints.parsers.marked_calls import MarkedCalls
    from mvllm.entrypoints.parsers.reasoning.tagged import TaggedReasoning
    from mvllm.errors import ConfigError, ModelError, MvllmError, RequestError
    from mvllm.executor.interface import Executor
    from mvllm.executor.multiproc import MultiprocExecutor
    from mvllm.executor.uniproc import UniProcExecutor
    from mvllm.layers.attention import Attention
    from mvllm.layers.context import BuildContext, ForwardStep
    from mvllm.layers.embedding import Embedding, LMHead, VocabEmbedding
    from mvllm.layers.linear import ColumnParallelLinear, QKVLinear, ReplicatedLinear, RowParallelLinear
    from mvllm.layers.matrix_layout import MatrixLayout, Part
    from mvllm.layers.mlp import MLP, GatedMLP
    from mvllm.layers.norm import LayerNorm, RMSNorm
    from mvllm.layers.quantization.interface import IntegerFormat, QuantizationMethod
    from mvllm.layers.quantization.matrix import IntegerMatrix, QuantizedMatrix, staging
    from mvllm.layers.rotary import RotaryEmbedding
    from mvllm.layers.weight_target import WeightTarget
    from mvllm.logging import get_logger
    from mvllm.messages.requests import SchedulerStats
    from mvllm.messages.sampling_params import SamplingParams
    from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
    from mvllm.models.causal_lm import CausalLM
    from mvllm.ops.quantized_linear import QuantizedWeight
    from mvllm.platform.interface import Platform
    from mvllm.platform.op_provider import OpCase, OpProvider
    from mvllm.sampling.logits_processor import LogitsProcessor, LogitsProcessorContext, RowTokens

_HOMES = {
    "EngineConfig": "mvllm.config.engine_config",
    "HFConfig": "mvllm.config.hf_config",
    "ModelConfig": "mvllm.config.model",
    "RopeParameters": "mvllm.config.rope_parameters",
    "RequestOutput": "mvllm.engine.outputs",
    "StatLogger": "mvllm.engine.stat_loggers",
    "APIError": "mvllm.entrypoints.openai.errors",
    "HTTPServerHandle": "mvllm.entrypoints.openai.http_plugins",
    "ContentDelta": "mvllm.entrypoints.parsers.interface",
    "Delta": "mvllm.entrypoints.parsers.interface",
    "ReasoningDelta": "mvllm.entrypoints.parsers.interface",
    "ReasoningParser": "mvllm.entrypoints.parsers.interface",
    "ReasoningStream": "mvllm.entrypoints.parsers.interface",
    "ToolCallDelta": "mvllm.entrypoints.parsers.interface",
    "ToolParser": "mvllm.entrypoints.parsers.interface",
    "ToolStream": "mvllm.entrypoints.parsers.interface",
    "MarkedCalls": "mvllm.entrypoints.parsers.marked_calls",
    "TaggedReasoning": "mvllm.entrypoints.parsers.reasoning.tagged",
    "ConfigError": "mvllm.errors",
    "ModelError": "mvllm.errors",
    "MvllmError": "mvllm.errors",
    "RequestError": "mvllm.errors",
    "Executor": "mvllm.executor.interface",
    "MultiprocExecutor": "mvllm.executor.multiproc",
    "UniProcExecutor": "mvllm.executor.uniproc",
    "Attention": "mvllm.layers.attention",
    "BuildContext": "mvllm.layers.context",
    "ForwardStep": "mvllm.layers.context",
    "Embedding": "mvllm.layers.embedding",
    "LMHead": "mvllm.layers.embedding",
    "VocabEmbedding": "mvllm.layers.embedding",
    "ColumnParallelLinear": "mvllm.layers.linear",
    "QKVLinear": "mvllm.layers.linear",
    "ReplicatedLinear": "mvllm.layers.linear",
    "RowParallelLinear": "mvllm.layers.linear",
    "GatedMLP": "mvllm.layers.mlp",
    "MLP": "mvllm.layers.mlp",
    "MatrixLayout": "mvllm.layers.matrix_layout",
    "Part": "mvllm.layers.matrix_layout",
    "LayerNorm": "mvllm.layers.norm",
    "RMSNorm": "mvllm.layers.norm",
    "IntegerFormat": "mvllm.layers.quantization.interface",
    "QuantizationMethod": "mvllm.layers.quantization.interface",
    "IntegerMatrix": "mvllm.layers.quantization.matrix",
    "QuantizedMatrix": "mvllm.layers.quantization.matrix",
    "staging": "mvllm.layers.quantization.matrix",
    "RotaryEmbedding": "mvllm.layers.rotary",
    "WeightTarget": "mvllm.layers.weight_target",
    "get_logger": "mvllm.logging",
    "SchedulerStats": "mvllm.messages.requests",
    "SamplingParams": "mvllm.messages.sampling_params",
    "ModelRunnerOutput": "mvllm.messages.scheduler_output",
    "SchedulerOutput": "mvllm.messages.scheduler_output",
    "CausalLM": "mvllm.models.causal_lm",
    "QuantizedWeight": "mvllm.ops.quantized_linear",
    "Platform": "mvllm.platform.interface",
    "OpCase": "mvllm.platform.op_provider",
    "OpProvider": "mvllm.platform.op_provider",
    "LogitsProcessor": "mvllm.sampling.logits_processor",
    "LogitsProcessorContext": "mvllm.sampling.logits_processor",
    "RowTokens": "mvllm.sampling.logits_processor",
}
"""Where each name lives."""

__all__ = [
    "APIError",
    "Attention",
    "BuildContext",
    "CausalLM",
    "ColumnParallelLinear",
    "ConfigError",
    "ContentDelta",
    "Delta",
    "Embedding",
    "EngineConfig",
    "Executor",
    "ForwardStep",
    "GatedMLP",
    "HFConfig",
    "HTTPServerHandle",
    "IntegerFormat",
    "IntegerMatrix",
    "LMHead",
    "LayerNorm",
    "LogitsProcessor",
    "LogitsProcessorContext",
    "MLP",
    "MarkedCalls",
    "MatrixLayout",
    "ModelConfig",
    "ModelError",
    "ModelRunnerOutput",
    "MultiprocExecutor",
    "MvllmError",
    "OpCase",
    "OpProvider",
    "Part",
    "Platform",
    "QKVLinear",
    "QuantizationMethod",
    "QuantizedMatrix",
    "QuantizedWeight",
    "RMSNorm",
    "ReasoningDelta",
    "ReasoningParser",
    "ReasoningStream",
    "ReplicatedLinear",
    "RequestError",
    "RequestOutput",
    "RopeParameters",
    "RotaryEmbedding",
    "RowParallelLinear",
    "RowTokens",
    "SamplingParams",
    "SchedulerOutput",
    "SchedulerStats",
    "StatLogger",
    "TaggedReasoning",
    "ToolCallDelta",
    "ToolParser",
    "ToolStream",
    "UniProcExecutor",
    "VocabEmbedding",
    "WeightTarget",
    "get_logger",
    "staging",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mvllm.extension_api' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
