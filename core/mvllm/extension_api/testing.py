"""For packages that test platforms: the engine's parts one at a time, and the reference operations to compare with.

A platform's own tests find what they need in `mvllm.testing`. Names are resolved on first use: importing this module
loads neither torch nor the engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mvllm.attention.kv_quantization import round_to_kv_dtype as round_to_kv_dtype
    from mvllm.config.engine_args import EngineArgs as EngineArgs
    from mvllm.config.engine_config import replace_field as replace_field
    from mvllm.distributed.group_coordinator import GroupCoordinator as GroupCoordinator
    from mvllm.engine.core.config_resolution import resolve_config as resolve_config
    from mvllm.engine.core.kv_cache_sizing import size_kv_cache as size_kv_cache
    from mvllm.entrypoints.llm import LLM as LLM
    from mvllm.errors import CacheError as CacheError
    from mvllm.errors import EngineSleepingError as EngineSleepingError
    from mvllm.executor.factory import known_executors as known_executors
    from mvllm.executor.worker_topology import check_topology as check_topology
    from mvllm.layers.quantized_experts import ReadOnce as ReadOnce
    from mvllm.messages.inputs import PromptType as PromptType
    from mvllm.messages.inputs import TokensPrompt as TokensPrompt
    from mvllm.models.registry import resolve_model_class as resolve_model_class
    from mvllm.models.weight_loader import load_weights as load_weights
    from mvllm.ops.all_schemas import SCHEMAS as SCHEMAS
    from mvllm.ops.block_formats import BLOCK_FORMATS as BLOCK_FORMATS
    from mvllm.ops.block_quantized_linear import INPUT_BLOCK as INPUT_BLOCK
    from mvllm.ops.draw import draw_block as draw_block
    from mvllm.ops.draw import filtered_draw as filtered_draw
    from mvllm.ops.dtypes import torch_dtype as torch_dtype
    from mvllm.ops.moe import UNGATED_ACTIVATIONS as UNGATED_ACTIVATIONS
    from mvllm.ops.moe import clamped_gate as clamped_gate
    from mvllm.ops.moe import ungated_activation as ungated_activation
    from mvllm.ops.norm import fused_add_rms_norm as fused_add_rms_norm
    from mvllm.ops.norm import rms_norm as rms_norm
    from mvllm.ops.provider_plugins import installed_providers as installed_providers
    from mvllm.ops.registry import REFERENCE as REFERENCE
    from mvllm.ops.registry import OpTable as OpTable
    from mvllm.ops.rotary import rotary_embedding as rotary_embedding
    from mvllm.platform.checked_calls import call_checked as call_checked
    from mvllm.platform.checked_calls import check_kv_transfer as check_kv_transfer
    from mvllm.platform.checked_calls import checked_attention_backend as checked_attention_backend
    from mvllm.platform.checked_calls import checked_state_backend as checked_state_backend
    from mvllm.platform.choose import choose_platform as choose_platform
    from mvllm.platform.discovery import SLOW_PROBE_SECONDS as SLOW_PROBE_SECONDS
    from mvllm.platform.discovery import Candidate as Candidate
    from mvllm.platform.discovery import check_contract as check_contract
    from mvllm.platform.discovery import discover as discover
    from mvllm.platform.discovery import dotted as dotted
    from mvllm.platform.discovery import find_sources as find_sources
    from mvllm.platform.discovery import load_attribute as load_attribute
    from mvllm.platform.phases import enter_phase as enter_phase
    from mvllm.platform.tensor_caches import tensors_of as tensors_of
    from mvllm.sampling.sampler import Sampler as Sampler
    from mvllm.sampling.sampler_output import SamplerOutput as SamplerOutput
    from mvllm.sampling.sampling_state import SamplingState as SamplingState
    from mvllm.sampling.token_history import TokenHistory as TokenHistory
    from mvllm.version import __version__ as __version__
    from mvllm.worker.host_blocks import CopiedRows as CopiedRows
    from mvllm.worker.host_blocks import HostBlocks as HostBlocks
    from mvllm.worker.static_items import ItemInputSpec as ItemInputSpec
    from mvllm.worker.step_inputs import StepInputBuilder as StepInputBuilder
    from mvllm.worker.step_inputs import StepInputs as StepInputs
    from mvllm.worker.worker import Worker as Worker

_NAMES = {
    "mvllm.attention.kv_quantization": "round_to_kv_dtype",
    "mvllm.config.engine_args": "EngineArgs",
    "mvllm.config.engine_config": "replace_field",
    "mvllm.distributed.group_coordinator": "GroupCoordinator",
    "mvllm.engine.core.config_resolution": "resolve_config",
    "mvllm.engine.core.kv_cache_sizing": "size_kv_cache",
    "mvllm.entrypoints.llm": "LLM",
    "mvllm.errors": "CacheError EngineSleepingError",
    "mvllm.executor.factory": "known_executors",
    "mvllm.executor.worker_topology": "check_topology",
    "mvllm.layers.quantized_experts": "ReadOnce",
    "mvllm.messages.inputs": "PromptType TokensPrompt",
    "mvllm.models.registry": "resolve_model_class",
    "mvllm.models.weight_loader": "load_weights",
    "mvllm.ops.all_schemas": "SCHEMAS",
    "mvllm.ops.block_formats": "BLOCK_FORMATS",
    "mvllm.ops.block_quantized_linear": "INPUT_BLOCK",
    "mvllm.ops.draw": "draw_block filtered_draw",
    "mvllm.ops.dtypes": "torch_dtype",
    "mvllm.ops.moe": "UNGATED_ACTIVATIONS clamped_gate ungated_activation",
    "mvllm.ops.norm": "fused_add_rms_norm rms_norm",
    "mvllm.ops.provider_plugins": "installed_providers",
    "mvllm.ops.registry": "OpTable REFERENCE",
    "mvllm.ops.rotary": "rotary_embedding",
    "mvllm.platform.checked_calls": "call_checked check_kv_transfer checked_attention_backend checked_state_backend",
    "mvllm.platform.choose": "choose_platform",
    "mvllm.platform.discovery": (
        "Candidate SLOW_PROBE_SECONDS check_contract discover dotted find_sources load_attribute"
    ),
    "mvllm.platform.phases": "enter_phase",
    "mvllm.platform.tensor_caches": "tensors_of",
    "mvllm.sampling.sampler": "Sampler",
    "mvllm.sampling.sampler_output": "SamplerOutput",
    "mvllm.sampling.sampling_state": "SamplingState",
    "mvllm.sampling.token_history": "TokenHistory",
    "mvllm.version": "__version__",
    "mvllm.worker.host_blocks": "CopiedRows HostBlocks",
    "mvllm.worker.static_items": "ItemInputSpec",
    "mvllm.worker.step_inputs": "StepInputBuilder StepInputs",
    "mvllm.worker.worker": "Worker",
}
"""Names of this interface by the module that defines them."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*sorted(_MODULES)]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'mvllm.extension_api.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
