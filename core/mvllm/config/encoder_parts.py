"""Reads the parts of config.json that are about encoders: for the records of families. Needs no torch."""

from __future__ import annotations

from mvllm.config.hf_config import HFConfig
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
