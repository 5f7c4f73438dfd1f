"""For packages with a worker that runs models in another way than core's (entry points of `mvllm.workers`).

Such a package replaces parts of core's worker by subclasses. Members with one underscore are for subclasses, too:

    Worker ──runner_class──> ModelRunner ──layers_class───> KVCacheLayers (StateLayers)
                                         ──loader_class───> ModelLoader: DraftModel, LoRAModelManager
                                         ──forward_class──> ModelForward: StepForward
"""

from mvllm.config.encoder_limits import items_of as items_of
from mvllm.config.engine_config import MIN_SNAPSHOT_TOKENS as MIN_SNAPSHOT_TOKENS
from mvllm.distributed.group_coordinator import GroupCoordinator as GroupCoordinator
from mvllm.errors import CacheError as CacheError
from mvllm.layers.lora import CurrentLoRAMapping as CurrentLoRAMapping
from mvllm.layers.lora import LoRAMapping as LoRAMapping
from mvllm.ops.argmax import argmax as argmax
from mvllm.platform.checked_calls import call_checked as call_checked
from mvllm.platform.checked_calls import check_attention_capabilities as check_attention_capabilities
from mvllm.sampling.sampler_output import HostSamplerOutput as HostSamplerOutput
from mvllm.worker.decoder_forward import StepForward as StepForward
from mvllm.worker.encoder_runner import StepItemTensors as StepItemTensors
from mvllm.worker.greedy_head import Argmax as Argmax
from mvllm.worker.host_blocks import CopiedRows as CopiedRows
from mvllm.worker.kv_cache_layers import KVCacheLayers as KVCacheLayers
from mvllm.worker.lora_model_manager import LoRAModelManager as LoRAModelManager
from mvllm.worker.model_forward import ModelForward as ModelForward
from mvllm.worker.model_loader import ModelLoader as ModelLoader
from mvllm.worker.model_runner import ModelRunner as ModelRunner
from mvllm.worker.out_of_memory import out_of_memory_as as out_of_memory_as
from mvllm.worker.sampled_token_buffer import SampledTokenBuffer as SampledTokenBuffer
from mvllm.worker.space_logits import LogitsModel as LogitsModel
from mvllm.worker.spec_decode.draft_model import DraftModel as DraftModel
from mvllm.worker.state_layers import StateLayers as StateLayers
from mvllm.worker.static_items import ItemInputSpec as ItemInputSpec
from mvllm.worker.step_inputs import StepInputs as StepInputs
from mvllm.worker.step_result import ComputedStep as ComputedStep
from mvllm.worker.worker import Worker as Worker

__all__ = [
    "Argmax",
    "CacheError",
    "ComputedStep",
    "CopiedRows",
    "CurrentLoRAMapping",
    "DraftModel",
    "GroupCoordinator",
    "HostSamplerOutput",
    "ItemInputSpec",
    "KVCacheLayers",
    "LoRAMapping",
    "LoRAModelManager",
    "LogitsModel",
    "MIN_SNAPSHOT_TOKENS",
    "ModelForward",
    "ModelLoader",
    "ModelRunner",
    "SampledTokenBuffer",
    "StateLayers",
    "StepForward",
    "StepInputs",
    "StepItemTensors",
    "Worker",
    "argmax",
    "call_checked",
    "check_attention_capabilities",
    "items_of",
    "out_of_memory_as",
]
