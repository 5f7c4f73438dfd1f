"""Models that cut images into tiles: Idefics3, SmolVLM, InternVL and LFM2-VL.

The text that replaces an image has tokens between the placeholders of its tiles, so its span has several parts that
take embeddings. A frame of a video is one tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mvllm.errors import RequestError
from mvllm.multimodal.frame_sampling import FrameDefaults
from mvllm.multimodal.item_families.frames import (
    HALVES,
    LANCZOS,
    SquareFrames,
    SquareRules,
    TwiceResizedFrames,
    TwiceResizedRules,
)
from mvllm.multimodal.item_families.interface import Features, ItemFamily


class Idefics3Items(ItemFamily):
    """Idefics3 and SmolVLM. All tiles of an image have one size, so their masks have no zeros."""

    unused_features = frozenset({"rows", "cols", "pixel_attention_mask"})

    def process_image(self, image: Any, settings: dict[str, Any]) -> tuple[Features, str]:
        features, replacement = super().process_image(image, settings)
        mask = features.get("pixel_attention_mask")
        if mask is not None and not np.asarray(mask).all():
            raise RequestError(
                "The image processor pads this image, which is not supported for this model. Leave out the arguments "
                "of the image processor that change its sizes (mm_processor_kwargs).",
                parameter="multi_modal_data",
            )
        return features, replacement


class SmolVLMItems(Idefics3Items):
    """SmolVLM. Each frame of a video has its time before it."""

    def frame_processor(self) -> TwiceResizedFrames:
        rules = TwiceResizedRules(mean=HALVES, std=HALVES, resample=LANCZOS)
        return TwiceResizedFrames.from_config(self.hf_config.source, rules)


class InternVLItems(ItemFamily):
    """InternVL."""

    unused_features = frozenset({"num_patches"})
    default_frames = FrameDefaults(placement="middles")

    def frame_processor(self) -> SquareFrames:
        return SquareFrames.from_config(self.hf_config.source, SquareRules())

    def features_to_keep(self, modality: str, features: Features) -> Features:
        """Frames have the name of tiles, as transformers' model takes them."""
        kept = super().features_to_keep(modality, features)
        return {"pixel_values": kept["pixel_values_videos"][0]} if modality == "video" else kept


class Lfm2VlItems(ItemFamily):
    """LFM2-VL. The patches of all tiles are padded to the largest number of the item."""

    unused_features = frozenset({"pixel_attention_mask"})

    def process_image(self, image: Any, settings: dict[str, Any]) -> tuple[Features, str]:
        wrapped = getattr(self.processor, "use_image_special_tokens", True)
        return super().process_image(image, {"use_image_special_tokens": wrapped, **settings})

    def features_to_keep(self, modality: str, features: Features) -> Features:
        kept = super().features_to_keep(modality, features)
        longest = int(np.prod(np.asarray(kept["spatial_shapes"]), axis=-1).max())
        return {**kept, "pixel_values": kept["pixel_values"][:, :longest]}
