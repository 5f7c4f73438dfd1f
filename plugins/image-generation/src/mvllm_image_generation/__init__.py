"""Image generation for mvllm: Janus and Emu3, and classifier-free guidance."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mvllm_image_generation.engine_methods import AsyncImages, Images
    from mvllm_image_generation.image_params import ImageParams
    from mvllm_image_generation.outputs import GeneratedImage, ImageRequestOutput

_MODULES = {
    "AsyncImages": "engine_methods",
    "GeneratedImage": "outputs",
    "ImageParams": "image_params",
    "ImageRequestOutput": "outputs",
    "Images": "engine_methods",
}

__all__ = ["AsyncImages", "GeneratedImage", "ImageParams", "ImageRequestOutput", "Images"]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
