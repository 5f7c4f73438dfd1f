"""Processors that transformers cannot build without packages that images do not need.

The modules of Pixtral's processor and of LFM2-VL's image processor import torchvision. SmolVLM's processor needs
num2words, for the text before a video, and torchvision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mvllm.multimodal import installed_packages


def smolvlm_processor(path: Path, arguments: dict[str, Any]) -> Any:
    """The processor of SmolVLM, without num2words; images and videos are prepared by torchvision if it is installed."""
    from transformers import AutoVideoProcessor

    from mvllm.multimodal.item_families.smolvlm_processor import SmolVLMProcessor

    if not installed_packages.is_installed("torchvision"):
        return SmolVLMProcessor.from_pretrained(str(path), backend="pil", **arguments)
    processor = SmolVLMProcessor.from_pretrained(str(path), **arguments)
    processor.video_processor = AutoVideoProcessor.from_pretrained(str(path), **arguments)
    return processor


def pixtral_processor(path: Path, arguments: dict[str, Any]) -> Any:
    """The processor of Pixtral, without imports of torchvision."""
    from mvllm.multimodal.pixtral_processor import PixtralProcessor

    return PixtralProcessor.from_pretrained(str(path), backend="pil", **arguments)


def lfm2_vl_processor(path: Path, arguments: dict[str, Any]) -> Any:
    """The processor of LFM2-VL with an image processor that computes with Pillow and numpy."""
    from transformers import AutoTokenizer, Lfm2VlProcessor

    from mvllm.multimodal.item_families.lfm2_vl_image_processor import Lfm2VlImageProcessorPil

    images = Lfm2VlImageProcessorPil.from_pretrained(str(path), local_files_only=True)
    return Lfm2VlProcessor(images, AutoTokenizer.from_pretrained(str(path), **arguments))
