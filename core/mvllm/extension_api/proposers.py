"""For packages with methods of speculative decoding (entry points of `mvllm.proposers`).

The entry point is a DraftMethod, which reads settings and needs no torch. It names the class of proposers, which only
workers import: so `mvllm.extension_api.draft_heads` has what needs torch.
"""

from mvllm.config.draft_method import BuildModel as BuildModel
from mvllm.config.draft_method import DraftMethod as DraftMethod
from mvllm.config.draft_method import DraftSettings as DraftSettings
from mvllm.config.draft_method import ReadConfig as ReadConfig
from mvllm.config.draft_method import SpeculativeConfig as SpeculativeConfig
from mvllm.config.hf_config import HFConfig as HFConfig
from mvllm.config.model import ModelConfig as ModelConfig
from mvllm.errors import ConfigError as ConfigError

__all__ = [
    "BuildModel",
    "ConfigError",
    "DraftMethod",
    "DraftSettings",
    "HFConfig",
    "ModelConfig",
    "ReadConfig",
    "SpeculativeConfig",
]
