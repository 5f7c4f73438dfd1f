"""Public interface for platform plugins: the only package of mvllm that they may import.

Importing it loads neither torch nor a device library. Names that need torch are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mvllm.config.draft_method import SpeculativeConfig
from mvllm.config.engine_config import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    LoRAConfig,
    ParallelConfig,
    SchedulerConfig,
)
from mvllm.config.hf_config import HFConfig
from mvllm.config.kv_events import KVEventsConfig
from mvllm.config.kv_transfer import KVConnectorConfig, KVTransferConfig
from mvllm.config.model import ModelConfig
from mvllm.config.model_kind import ModelKind
from mvllm.config.multimodal import MultiModalConfig, MultiModalModel
from mvllm.config.token_spaces import TokenSpace
from mvllm.contract import Phase
from mvllm.errors import ConfigError, ContractError, MvllmError, PlatformError
from mvllm.installation import install_command
from mvllm.logging import get_logger
from mvllm.messages.lora import LoRARequest
from mvllm.messages.multimodal import ArrayData, EncoderInput, ItemSpan
from mvllm.messages.pooling_params import Activation, PoolingParams, PoolingTask, PoolingType
from mvllm.messages.requests import PositionLogprobs
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams
from mvllm.messages.scheduler_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from mvllm.messages.structured_outputs import StructuredOutputsParams
from mvllm.messages.thinking import ThinkingTokens
from mvllm.messages.weights import WeightSource, WeightTransferInfo, WeightUpdate
from mvllm.platform.attention import (
    AttentionBackend,
    AttentionMetadata,
    BatchLayout,
    KVCache,
    RotarySpec,
    RotaryWriter,
)
from mvllm.platform.attention_spec import AttentionSpec, KVLayout
from mvllm.platform.block_transfer import BlockTransfer
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.communicator import Communicator
from mvllm.platform.graph_compiler import DeviceArray, GraphCompiler, GraphProgram
from mvllm.platform.graphs import CompileBackend, GraphBackend
from mvllm.platform.hookspecs import hookimpl
from mvllm.platform.interface import Platform
from mvllm.platform.op_provider import OpCase, OpProvider
from mvllm.platform.phases import current_phase, require_phase
from mvllm.platform.runtime import DeviceRuntime, Event, FinishedHostCopy, HostCopy, MemoryInfo, NullEvent
from mvllm.platform.shapes import CaptureShapes, ShapePolicy, StepKind
from mvllm.platform.spec import (
    CONTRACT,
    Check,
    CheckStatus,
    ConfigChange,
    DeviceInfo,
    Plan,
    PlatformSpec,
    ProbeResult,
    Refusal,
    Refusals,
)
from mvllm.platform.state import State, StateArguments, StateBackend, StateLayout, StateSpec, StateTensor
from mvllm.platform.step_graph import CacheValue, Dim, Kind, Node, StateValue, StepGraph, StepSizes, Value
from mvllm.platform.topology import GroupSpec, LaunchTopology, WorkerContext
from mvllm.platform.worker_protocol import HostBlockNeeds, KVCacheNeeds, WorkerProtocol

if TYPE_CHECKING:
    from mvllm.attention.reference import ReferenceAttention
    from mvllm.distributed.torch_communicator import TorchCommunicator
    from mvllm.ops.block_quantized_linear import BlockQuantizedPart, BlockQuantizedWeight
    from mvllm.ops.float8_linear import Float8Inputs, Float8Weight
    from mvllm.ops.quantized_linear import QuantizedWeight
    from mvllm.ops.quantized_moe import ExpertWeight
    from mvllm.ops.static_state_ops import static_state_ops

_LAZY = {
    "BlockQuantizedPart": "mvllm.ops.block_quantized_linear",
    "BlockQuantizedWeight": "mvllm.ops.block_quantized_linear",
    "ExpertWeight": "mvllm.ops.quantized_moe",
    "Float8Inputs": "mvllm.ops.float8_linear",
    "Float8Weight": "mvllm.ops.float8_linear",
    "QuantizedWeight": "mvllm.ops.quantized_linear",
    "ReferenceAttention": "mvllm.attention.reference",
    "TorchCommunicator": "mvllm.distributed.torch_communicator",
    "static_state_ops": "mvllm.ops.static_state_ops",
}

__all__ = [
    "CONTRACT",
    "Activation",
    "ArrayData",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "BatchLayout",
    "BlockQuantizedPart",
    "BlockQuantizedWeight",
    "BlockTransfer",
    "CacheConfig",
    "CacheValue",
    "Capabilities",
    "CaptureShapes",
    "Check",
    "CheckStatus",
    "Communicator",
    "CompileBackend",
    "ConfigChange",
    "ConfigError",
    "ContractError",
    "DeviceArray",
    "DeviceInfo",
    "DeviceRuntime",
    "Dim",
    "EncoderInput",
    "EngineConfig",
    "Event",
    "ExpertWeight",
    "FinishedHostCopy",
    "Float8Inputs",
    "Float8Weight",
    "GraphBackend",
    "GraphCompiler",
    "GraphProgram",
    "GroupSpec",
    "HFConfig",
    "HostBlockNeeds",
    "HostCopy",
    "ItemSpan",
    "KVCache",
    "KVCacheNeeds",
    "KVConnectorConfig",
    "KVEventsConfig",
    "KVLayout",
    "KVTransferConfig",
    "Kind",
    "LaunchTopology",
    "LoRAConfig",
    "LoRARequest",
    "LoadConfig",
    "MemoryInfo",
    "ModelConfig",
    "ModelKind",
    "ModelRunnerOutput",
    "MultiModalConfig",
    "MultiModalModel",
    "MvllmError",
    "NewRequestData",
    "Node",
    "NullEvent",
    "OpCase",
    "OpProvider",
    "ParallelConfig",
    "Phase",
    "Plan",
    "Platform",
    "PlatformError",
    "PlatformSpec",
    "PoolingParams",
    "PoolingTask",
    "PoolingType",
    "PositionLogprobs",
    "ProbeResult",
    "QuantizedWeight",
    "ReferenceAttention",
    "Refusal",
    "Refusals",
    "RequestOutputKind",
    "RotarySpec",
    "RotaryWriter",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerOutput",
    "ShapePolicy",
    "SpeculativeConfig",
    "State",
    "StateArguments",
    "StateBackend",
    "StateLayout",
    "StateSpec",
    "StateTensor",
    "StateValue",
    "StepGraph",
    "StepKind",
    "StepSizes",
    "StructuredOutputsParams",
    "ThinkingTokens",
    "TokenSpace",
    "TorchCommunicator",
    "Value",
    "WeightSource",
    "WeightTransferInfo",
    "WeightUpdate",
    "WorkerContext",
    "WorkerProtocol",
    "current_phase",
    "get_logger",
    "hookimpl",
    "install_command",
    "require_phase",
    "static_state_ops",
]


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'mvllm.plugin_api' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
