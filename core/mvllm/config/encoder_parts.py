"""Reads the parts of config.json that are about encoders: for the records of families. Needs no torch."""

from __future__ import annotations

from mvllm.config.hf_config import HFConfig
from mvllm.config.model_family import ReadItems
from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import ModelError


def part_config(hf: HFConfig, key: str) -> HFConfig | None:
    """The object `key` of config.json; None if it is absent or empty: the checkpoint is a text model.

    Raises:
        ModelError: It is not an object.
    """
    return HFConfig(hf.require(key, dict), f"{hf.source}: {key!r}") if hf.get(key) else None


def vision_config(hf: HFConfig) -> HFConfig | None:
    """`vision_config`, as `part_config`."""
    return part_config(hf, "vision_config")


def image_token_id(hf: HFConfig, default: int) -> int:
    """The token id of the positions that take an embedding of an image.

    Raises:
        ModelError: It is not a token id.
    """
    return token_id(hf, ("image_token_id", "image_token_index"), default)


def video_token_id(hf: HFConfig, default: int) -> int:
    """As `image_token_id`, of a video."""
    return token_id(hf, ("video_token_id", "video_token_index"), default)


def token_id(hf: HFConfig, keys: tuple[str, ...], default: int) -> int:
    """The token id under the first of the keys that config.json has.

    Raises:
        ModelError: It is not a token id.
    """
    key = next((key for key in keys if key in hf), keys[0])
    value = hf.get(key, default)
    if type(value) is not int or value < 0:
        raise ModelError(f"{hf.source}: {key!r} should be a token id, found {value!r}.")
    return value


def image_items_reader(image_id: int, video_id: int | None = None, *, frames_are_images: bool = False) -> ReadItems:
    """`Architecture.read_items` of a family whose config.json does not bound the rows of an image.

    Args:
        image_id, video_id: transformers' defaults of the token ids of images and videos; None: it takes no videos.
        frames_are_images: The family takes videos, whose frames are marked as images are.
    """

    def read(hf: HFConfig) -> MultiModalModel | None:
        if vision_config(hf) is None:
            return None
        placeholders = {"image": image_token_id(hf, image_id)}
        if frames_are_images:
            placeholders["video"] = placeholders["image"]
        elif video_id is not None:
            placeholders["video"] = video_token_id(hf, video_id)
        return MultiModalModel(
            placeholders=placeholders,
            embedding_width=hf.positive_int("hidden_size"),
            written_as={"video": "<video>"} if frames_are_images else {},
        )

    return read
