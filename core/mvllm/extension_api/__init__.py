"""Public interface for plugins other than platforms: models, executors, parsers, stat loggers, commands and others.

Unlike `mvllm.plugin_api`, it has no contract version and may change with every minor version of mvllm. Packages that
use it therefore require a range (`mvllm>=0.9,<1`). Names are resolved on first use; importing this module loads
neither torch nor the engine. docs/how-to/extending.md describes the groups of names, docs/reference/executors.md those
for executors with worker processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mvllm.config.engine_config import EngineConfig
    from mvllm.config.hf_config import HFConfig
    from mvllm.config.model import ModelConfig
    from mvllm.config.rope_parameters import RopeParameters
    from mvllm.engine.frontend.outputs import RequestOutput
    from mvllm.engine.metrics.stat_loggers import StatLogger
    from mvllm.entrypoints.openai.common.api_format import error_response, set_api_format
    from mvllm.entrypoints.openai.common.errors import APIError
    from mvllm.entrypoints.openai.server.http_plugins import HTTPServerHandle
    from mvllm.entrypoints.parsers.interface import (
        CallSyntax,
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
    from mvllm.entrypoints.parsers.tagged_reasoning import TaggedReasoning
    from mvllm.entrypoints.root_plugins import api_formats
    from mvllm.errors import (
        ConfigError,
        EngineDeadError,
        ModelError,
        MvllmError,
        PlatformError,
        RequestError,
        WorkerDiedError,
        WorkerStuckError,
    )
    from mvllm.executor.interface import Executor
    from mvllm.executor.multiproc import MultiprocExecutor
    from mvllm.executor.uniproc import UniProcExecutor
    from mvllm.installation import install_command
    from mvllm.layers.attention import Attention
    from mvllm.layers.context import BuildContext, ForwardStep
    from mvllm.layers.embedding import Embedding, LMHead, VocabEmbedding
    from mvllm.layers.linear import ColumnParallelLinear, QKVLinear, ReplicatedLinear, RowParallelLinear
    from mvllm.layers.matrix_layout import MatrixLayout, Part
    from mvllm.layers.mlp import MLP, GatedMLP
    from mvllm.layers.norm import LayerNorm, RMSNorm
    from mvllm.layers.quantization.interface import IntegerFormat, QuantizationMethod
    from mvllm.layers.quantization.quantized_matrix import IntegerMatrix, QuantizedMatrix, staging
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
    from mvllm.platform.topology import LaunchTopology, WorkerContext
    from mvllm.sampling.logits_combiner import LogitsCombiner
    from mvllm.sampling.logits_processor import LogitsProcessor, LogitsProcessorContext, RowTokens
    from mvllm.sampling.request_logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor
    from mvllm.worker.worker_wrapper import WorkerWrapper

_NAMES = {
    "mvllm.config.engine_config": "EngineConfig",
    "mvllm.config.hf_config": "HFConfig",
    "mvllm.config.model": "ModelConfig",
    "mvllm.config.rope_parameters": "RopeParameters",
    "mvllm.engine.frontend.outputs": "RequestOutput",
    "mvllm.engine.metrics.stat_loggers": "StatLogger",
    "mvllm.entrypoints.openai.common.api_format": "error_response set_api_format",
    "mvllm.entrypoints.openai.common.errors": "APIError",
    "mvllm.entrypoints.openai.server.http_plugins": "HTTPServerHandle",
    "mvllm.entrypoints.parsers.interface": (
        "CallSyntax ContentDelta Delta ReasoningDelta ReasoningParser ReasoningStream ToolCallDelta ToolParser "
        "ToolStream"
    ),
    "mvllm.entrypoints.parsers.marked_calls": "MarkedCalls",
    "mvllm.entrypoints.parsers.tagged_reasoning": "TaggedReasoning",
    "mvllm.entrypoints.root_plugins": "api_formats",
    "mvllm.errors": (
        "ConfigError EngineDeadError ModelError MvllmError PlatformError RequestError WorkerDiedError WorkerStuckError"
    ),
    "mvllm.executor.interface": "Executor",
    "mvllm.executor.multiproc": "MultiprocExecutor",
    "mvllm.executor.uniproc": "UniProcExecutor",
    "mvllm.installation": "install_command",
    "mvllm.layers.attention": "Attention",
    "mvllm.layers.context": "BuildContext ForwardStep",
    "mvllm.layers.embedding": "Embedding LMHead VocabEmbedding",
    "mvllm.layers.linear": "ColumnParallelLinear QKVLinear ReplicatedLinear RowParallelLinear",
    "mvllm.layers.matrix_layout": "MatrixLayout Part",
    "mvllm.layers.mlp": "GatedMLP MLP",
    "mvllm.layers.norm": "LayerNorm RMSNorm",
    "mvllm.layers.quantization.interface": "IntegerFormat QuantizationMethod",
    "mvllm.layers.quantization.quantized_matrix": "IntegerMatrix QuantizedMatrix staging",
    "mvllm.layers.rotary": "RotaryEmbedding",
    "mvllm.layers.weight_target": "WeightTarget",
    "mvllm.logging": "get_logger",
    "mvllm.messages.requests": "SchedulerStats",
    "mvllm.messages.sampling_params": "SamplingParams",
    "mvllm.messages.scheduler_output": "ModelRunnerOutput SchedulerOutput",
    "mvllm.models.causal_lm": "CausalLM",
    "mvllm.ops.quantized_linear": "QuantizedWeight",
    "mvllm.platform.interface": "Platform",
    "mvllm.platform.op_provider": "OpCase OpProvider",
    "mvllm.platform.topology": "LaunchTopology WorkerContext",
    "mvllm.sampling.logits_combiner": "LogitsCombiner",
    "mvllm.sampling.logits_processor": "LogitsProcessor LogitsProcessorContext RowTokens",
    "mvllm.sampling.request_logits_processor": "AdapterLogitsProcessor RequestLogitsProcessor",
    "mvllm.worker.worker_wrapper": "WorkerWrapper",
}
"""Names of this interface by the module that defines them."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "MLP",
    "APIError",
    "AdapterLogitsProcessor",
    "Attention",
    "BuildContext",
    "CallSyntax",
    "CausalLM",
    "ColumnParallelLinear",
    "ConfigError",
    "ContentDelta",
    "Delta",
    "Embedding",
    "EngineConfig",
    "EngineDeadError",
    "Executor",
    "ForwardStep",
    "GatedMLP",
    "HFConfig",
    "HTTPServerHandle",
    "IntegerFormat",
    "IntegerMatrix",
    "LMHead",
    "LaunchTopology",
    "LayerNorm",
    "LogitsCombiner",
    "LogitsProcessor",
    "LogitsProcessorContext",
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
    "PlatformError",
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
    "RequestLogitsProcessor",
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
    "WorkerContext",
    "WorkerDiedError",
    "WorkerStuckError",
    "WorkerWrapper",
    "api_formats",
    "error_response",
    "get_logger",
    "install_command",
    "set_api_format",
    "staging",
]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'mvllm.extension_api' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
