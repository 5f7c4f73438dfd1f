"""Readers of what Idefics3, SmolVLM, InternVL and LFM2-VL take beside text. Needs no torch.

The number of tiles of an image is the processor's choice, so config.json does not bound the rows of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.config.vision_families import image_token_id, vision_config


def _reader(default_id: int, *, with_videos: bool = False) -> Callable[[HFConfig], MultiModalModel | None]:
    """The reader of a family.

    Args:
        default_id: transformers' default of `image_token_id`.
        with_videos: The family takes videos. Their frames are marked as images are.
    """

    def read(hf: HFConfig) -> MultiModalModel | None:
        if vision_config(hf) is None:
            return None
        image = image_token_id(hf, default_id)
        return MultiModalModel(
            placeholders={"image": image, "video": image} if with_videos else {"image": image},
            embedding_width=hf.positive_int("hidden_size"),
            written_as={"video": "<video>"} if with_videos else {},
        )

    return read


TILE_FAMILIES: Mapping[str, Callable[[HFConfig], MultiModalModel | None]] = {
    "Idefics3ForConditionalGeneration": _reader(128_257),
    "SmolVLMForConditionalGeneration": _reader(128_257, with_videos=True),
    "InternVLForConditionalGeneration": _reader(151_667, with_videos=True),
    "Lfm2VlForConditionalGeneration": _reader(396),
}
"""By architecture."""
