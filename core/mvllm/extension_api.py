"""The names that plugins other than platforms (models, executors, parsers, loggers, commands) may import from mvllm.

Unlike `mvllm.plugin_api`, this module has no contract version: names may change with every minor version of mvllm, so a
package that uses it requires a range (`mvllm>=0.1,<0.2`). Names are resolved on first use; importing this module loads
neither torch nor the engine. docs/how-to/extending.md describes each group of names, docs/reference/executors.md those
for executors whose workers run in processes of their own.
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
    from mvllm.entrypoints.openai.common.errors import APIError
    from mvllm.entrypoints.openai.server.http_plugins import HTTPServerHandle
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
    from mvllm.executor.config_codec import decode_config, encode_worker_configs
    from mvllm.executor.interface import Executor
    from mvllm.executor.message_queue import (
        MessageReader,
        MessageWriter,
        PeerDiedError,
        QueueError,
        ReaderHandle,
        RemoteReaderHandle,
        StopSignal,
        WriterHandle,
    )
    from mvllm.executor.multiproc import MultiprocExecutor
    from mvllm.executor.process.activity_table import Activity, ActivityTable
    from mvllm.executor.process.fd_server import (
        FileDescriptorServer,
        FileDescriptorServerAddress,
        MessageWithFds,
        fetch_descriptors,
    )
    from mvllm.executor.process.handshake import Handshake
    from mvllm.executor.process.process_utils import (
        StackFile,
        anonymous_file,
        dump_stacks_to,
        is_stopped,
        label_output,
        module_search_path,
        open_pidfd,
        watch_parent,
    )
    from mvllm.executor.rpc_executor import RpcExecutor, worker_names
    from mvllm.executor.rpc_messages import Reply, Request
    from mvllm.executor.rpc_queues import RemoteResponseQueue, RpcQueues
    from mvllm.executor.uniproc import UniProcExecutor
    from mvllm.executor.worker_group import WorkerGroup
    from mvllm.executor.worker_proc import WorkerProc
    from mvllm.executor.worker_topology import devices_per_worker, launch_topology
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
    from mvllm.logging import get_logger, log_level
    from mvllm.messages.requests import SchedulerStats
    from mvllm.messages.sampling_params import SamplingParams
    from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
    from mvllm.models.causal_lm import CausalLM
    from mvllm.ops.quantized_linear import QuantizedWeight
    from mvllm.platform.interface import Platform
    from mvllm.platform.op_provider import OpCase, OpProvider
    from mvllm.platform.topology import LaunchTopology, WorkerContext
    from mvllm.sampling.logits_processor import LogitsProcessor, LogitsProcessorContext, RowTokens
    from mvllm.worker.worker_wrapper import WorkerWrapper

_HOMES = {
    "EngineConfig": "mvllm.config.engine_config",
    "HFConfig": "mvllm.config.hf_config",
    "ModelConfig": "mvllm.config.model",
    "RopeParameters": "mvllm.config.rope_parameters",
    "RequestOutput": "mvllm.engine.frontend.outputs",
    "StatLogger": "mvllm.engine.metrics.stat_loggers",
    "APIError": "mvllm.entrypoints.openai.common.errors",
    "HTTPServerHandle": "mvllm.entrypoints.openai.server.http_plugins",
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
    "EngineDeadError": "mvllm.errors",
    "ModelError": "mvllm.errors",
    "MvllmError": "mvllm.errors",
    "PlatformError": "mvllm.errors",
    "RequestError": "mvllm.errors",
    "WorkerDiedError": "mvllm.errors",
    "WorkerStuckError": "mvllm.errors",
    "decode_config": "mvllm.executor.config_codec",
    "encode_worker_configs": "mvllm.executor.config_codec",
    "FileDescriptorServer": "mvllm.executor.process.fd_server",
    "FileDescriptorServerAddress": "mvllm.executor.process.fd_server",
    "MessageWithFds": "mvllm.executor.process.fd_server",
    "fetch_descriptors": "mvllm.executor.process.fd_server",
    "devices_per_worker": "mvllm.executor.worker_topology",
    "launch_topology": "mvllm.executor.worker_topology",
    "RpcQueues": "mvllm.executor.rpc_queues",
    "RemoteResponseQueue": "mvllm.executor.rpc_queues",
    "Handshake": "mvllm.executor.process.handshake",
    "Executor": "mvllm.executor.interface",
    "MessageReader": "mvllm.executor.message_queue",
    "MessageWriter": "mvllm.executor.message_queue",
    "PeerDiedError": "mvllm.executor.message_queue",
    "QueueError": "mvllm.executor.message_queue",
    "ReaderHandle": "mvllm.executor.message_queue",
    "RemoteReaderHandle": "mvllm.executor.message_queue",
    "StopSignal": "mvllm.executor.message_queue",
    "WriterHandle": "mvllm.executor.message_queue",
    "MultiprocExecutor": "mvllm.executor.multiproc",
    "StackFile": "mvllm.executor.process.process_utils",
    "dump_stacks_to": "mvllm.executor.process.process_utils",
    "is_stopped": "mvllm.executor.process.process_utils",
    "label_output": "mvllm.executor.process.process_utils",
    "open_pidfd": "mvllm.executor.process.process_utils",
    "module_search_path": "mvllm.executor.process.process_utils",
    "anonymous_file": "mvllm.executor.process.process_utils",
    "watch_parent": "mvllm.executor.process.process_utils",
    "Reply": "mvllm.executor.rpc_messages",
    "Request": "mvllm.executor.rpc_messages",
    "RpcExecutor": "mvllm.executor.rpc_executor",
    "worker_names": "mvllm.executor.rpc_executor",
    "Activity": "mvllm.executor.process.activity_table",
    "ActivityTable": "mvllm.executor.process.activity_table",
    "UniProcExecutor": "mvllm.executor.uniproc",
    "WorkerGroup": "mvllm.executor.worker_group",
    "WorkerProc": "mvllm.executor.worker_proc",
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
    "MatrixLayout": "mvllm.layers.matrix_layout",
    "Part": "mvllm.layers.matrix_layout",
    "GatedMLP": "mvllm.layers.mlp",
    "MLP": "mvllm.layers.mlp",
    "LayerNorm": "mvllm.layers.norm",
    "RMSNorm": "mvllm.layers.norm",
    "IntegerFormat": "mvllm.layers.quantization.interface",
    "QuantizationMethod": "mvllm.layers.quantization.interface",
    "IntegerMatrix": "mvllm.layers.quantization.quantized_matrix",
    "QuantizedMatrix": "mvllm.layers.quantization.quantized_matrix",
    "staging": "mvllm.layers.quantization.quantized_matrix",
    "RotaryEmbedding": "mvllm.layers.rotary",
    "WeightTarget": "mvllm.layers.weight_target",
    "get_logger": "mvllm.logging",
    "log_level": "mvllm.logging",
    "SchedulerStats": "mvllm.messages.requests",
    "SamplingParams": "mvllm.messages.sampling_params",
    "ModelRunnerOutput": "mvllm.messages.scheduler_output",
    "SchedulerOutput": "mvllm.messages.scheduler_output",
    "CausalLM": "mvllm.models.causal_lm",
    "QuantizedWeight": "mvllm.ops.quantized_linear",
    "Platform": "mvllm.platform.interface",
    "OpCase": "mvllm.platform.op_provider",
    "OpProvider": "mvllm.platform.op_provider",
    "LaunchTopology": "mvllm.platform.topology",
    "WorkerContext": "mvllm.platform.topology",
    "LogitsProcessor": "mvllm.sampling.logits_processor",
    "LogitsProcessorContext": "mvllm.sampling.logits_processor",
    "RowTokens": "mvllm.sampling.logits_processor",
    "WorkerWrapper": "mvllm.worker.worker_wrapper",
}
"""Where each name lives."""

__all__ = [
    "APIError",
    "Activity",
    "Attention",
    "BuildContext",
    "CausalLM",
    "ColumnParallelLinear",
    "ConfigError",
    "ContentDelta",
    "Delta",
    "FileDescriptorServer",
    "FileDescriptorServerAddress",
    "Embedding",
    "EngineConfig",
    "EngineDeadError",
    "RpcQueues",
    "Executor",
    "RemoteResponseQueue",
    "ForwardStep",
    "GatedMLP",
    "HFConfig",
    "HTTPServerHandle",
    "Handshake",
    "IntegerFormat",
    "IntegerMatrix",
    "LMHead",
    "LaunchTopology",
    "LayerNorm",
    "LogitsProcessor",
    "LogitsProcessorContext",
    "MLP",
    "MarkedCalls",
    "MatrixLayout",
    "MessageReader",
    "MessageWriter",
    "ModelConfig",
    "ModelError",
    "ModelRunnerOutput",
    "MultiprocExecutor",
    "MvllmError",
    "OpCase",
    "OpProvider",
    "MessageWithFds",
    "Part",
    "PeerDiedError",
    "Platform",
    "PlatformError",
    "QKVLinear",
    "QuantizationMethod",
    "QuantizedMatrix",
    "QuantizedWeight",
    "QueueError",
    "RMSNorm",
    "ReaderHandle",
    "ReasoningDelta",
    "ReasoningParser",
    "ReasoningStream",
    "RemoteReaderHandle",
    "ReplicatedLinear",
    "Reply",
    "Request",
    "RequestError",
    "RequestOutput",
    "RopeParameters",
    "RotaryEmbedding",
    "RowParallelLinear",
    "RowTokens",
    "RpcExecutor",
    "SamplingParams",
    "SchedulerOutput",
    "SchedulerStats",
    "StackFile",
    "StatLogger",
    "ActivityTable",
    "StopSignal",
    "TaggedReasoning",
    "ToolCallDelta",
    "ToolParser",
    "ToolStream",
    "UniProcExecutor",
    "VocabEmbedding",
    "WeightTarget",
    "WorkerContext",
    "WorkerDiedError",
    "WorkerGroup",
    "WorkerProc",
    "WorkerStuckError",
    "WorkerWrapper",
    "WriterHandle",
    "decode_config",
    "devices_per_worker",
    "dump_stacks_to",
    "encode_worker_configs",
    "fetch_descriptors",
    "get_logger",
    "is_stopped",
    "label_output",
    "launch_topology",
    "log_level",
    "open_pidfd",
    "module_search_path",
    "staging",
    "anonymous_file",
    "watch_parent",
    "worker_names",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mvllm.extension_api' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
