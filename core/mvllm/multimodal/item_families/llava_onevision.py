"""LLaVA-OneVision: one of several images of a prompt is not cut into tiles. Frames of videos have one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvllm.multimodal.item_families.frames import SquareFrames, SquareRules
from mvllm.multimodal.item_families.interface import Features, ItemFamily

_SEVERAL = "is_one_of_several"


class LlavaOnevisionItems(ItemFamily):
    """The processor sees an image alone, so it gets it twice to learn that it is one of several."""

    unused_features = frozenset({"batch_num_images"})

    def frame_processor(self) -> SquareFrames:
        return SquareFrames.from_config(self.hf_config.source, SquareRules())

    def arguments(self, modality: str, counts: Mapping[str, int]) -> dict[str, Any]:
        return {_SEVERAL: counts.get("image", 0) > 1} if modality == "image" else {}

    def process_image(self, image: Any, settings: dict[str, Any]) -> tuple[Features, str]:
        settings = dict(settings)
        if not settings.pop(_SEVERAL, False):
            return super().process_image(image, settings)
        features, replacements = self.processor._process_images([[image, image]], **settings)
        return {name: value[:1] for name, value in features.items()}, replacements[0]
