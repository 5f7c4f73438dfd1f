"""Processors that transformers cannot build without packages that images do not need.

The modules of Pixtral's processor and of LFM2-VL's image processor import torchvision. SmolVLM's processor needs
num2words, for the text before a video.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def smolvlm_processor(path: Path, arguments: dict[str, Any]) -> Any:
    """The processor of Idefics3, which makes the same of images."""
    from transformers import Idefics3Processor

    return Idefics3Processor.from_pretrained(str(path), backend="pil", **arguments)


def pixtral_processor(path: Path, arguments: dict[str, Any]) -> Any:
    """The processor of Pixtral, without imports of torchvision."""
    from mvllm.multimodal.pixtral_processor import PixtralProcessor

    return PixtralProcessor.from_pretrained(str(path), backend="pil", **arguments)


def lfm2_vl_processor(path: Path, arguments: dict[str, Any]) -> Any:
    """The processor of LFM2-VL with an image processor that computes with Pillow and numpy."""
    from transformers import AutoTokenizer, Lfm2VlProcessor

    from mvllm.multimodal.families.lfm2_vl_image_processor import Lfm2VlImageProcessorPil

    images = Lfm2VlImageProcessorPil.from_pretrained(str(path), local_files_only=True)
    return Lfm2VlProcessor(images, AutoTokenizer.from_pretrained(str(path), **arguments))
