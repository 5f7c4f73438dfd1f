"""For packages with a family of models (entry points of `mvllm.models` that name a module): the record of the family.

Importing this loads no torch, so that every process can import a module with a record. The classes that a record names
are built from `mvllm.extension_api` and `.multimodal_models`. docs/how-to/extending.md shows the whole.
"""

from __future__ import annotations

from mvllm.config.encoder_parts import image_token_id as image_token_id
from mvllm.config.encoder_parts import part_config as part_config
from mvllm.config.encoder_parts import token_id as token_id
from mvllm.config.encoder_parts import video_token_id as video_token_id
from mvllm.config.encoder_parts import vision_config as vision_config
from mvllm.config.hf_config import HFConfig as HFConfig
from mvllm.config.hf_config import read_json_object as read_json_object
from mvllm.config.model_family import Architecture as Architecture
from mvllm.config.model_family import ModelFamily as ModelFamily
from mvllm.config.model_family import ModelType as ModelType
from mvllm.config.model_family import MTPHeads as MTPHeads
from mvllm.config.model_family import pooling_architectures as pooling_architectures
from mvllm.config.multimodal import MODALITIES as MODALITIES
from mvllm.config.multimodal import MultiModalModel as MultiModalModel
from mvllm.config.token_spaces import TokenSpace as TokenSpace

__all__ = [
    "MODALITIES",
    "Architecture",
    "HFConfig",
    "MTPHeads",
    "ModelFamily",
    "ModelType",
    "MultiModalModel",
    "TokenSpace",
    "image_token_id",
    "part_config",
    "pooling_architectures",
    "read_json_object",
    "token_id",
    "video_token_id",
    "vision_config",
]
