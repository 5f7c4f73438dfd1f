"""Readers of what LLaVA, LLaVA-OneVision, Gemma 3, Gemma 4 and Mistral 3 take beside text. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mvllm.config.hf_config import HFConfig
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


def _patches(vision: HFConfig, image_size: int, patch_size: int) -> int:
    """Patches along each side of an image; the sizes are the family's defaults."""
    return vision.positive_int("image_size", image_size) // vision.positive_int("patch_size", patch_size)


def _llava(hf: HFConfig) -> MultiModalModel | None:
    vision = vision_config(hf)
    if vision is None:
        return None
    most = None if vision.get("model_type") == "pixtral" else _patches(vision, 224, 16) ** 2 + 1
    return MultiModalModel(
        placeholders={"image": image_token_id(hf, 32_000)},
        embedding_width=hf.positive_int("hidden_size"),
        max_encoded=most,
    )


def _llava_onevision(hf: HFConfig) -> MultiModalModel | None:
    if vision_config(hf) is None:
        return None
    return MultiModalModel(
        placeholders={"image": image_token_id(hf, 151_646), "video": video_token_id(hf, 151_647)},
        embedding_width=hf.positive_int("hidden_size"),
    )


def _gemma3(hf: HFConfig) -> MultiModalModel | None:
    if vision_config(hf) is None:
        return None
    return MultiModalModel(
        placeholders={"image": image_token_id(hf, 262_144)},
        embedding_width=hf.positive_int("hidden_size"),
        spans_attend_both_ways=True,
        max_encoded=hf.positive_int("mm_tokens_per_image", 256),
    )


def _gemma4(hf: HFConfig) -> MultiModalModel | None:
    if vision_config(hf) is None:
        return None
    has_videos = hf.get("video_token_id", 0) is not None
    videos = {"video": video_token_id(hf, 258_884)} if has_videos else {}
    audio = {"audio": token_id(hf, ("audio_token_id",), 258_881)} if part_config(hf, "audio_config") else {}
    return MultiModalModel(
        placeholders={"image": image_token_id(hf, 258_880), **videos, **audio},
        embedding_width=hf.positive_int("hidden_size"),
        spans_attend_both_ways=hf.get("use_bidirectional_attention") == "vision",
    )


def _mistral3(hf: HFConfig) -> MultiModalModel | None:
    if vision_config(hf) is None:
        return None
    return MultiModalModel(
        placeholders={"image": image_token_id(hf, 10)}, embedding_width=hf.positive_int("hidden_size")
    )


VISION_FAMILIES: Mapping[str, Callable[[HFConfig], MultiModalModel | None]] = {
    "LlavaForConditionalGeneration": _llava,
    "LlavaOnevisionForConditionalGeneration": _llava_onevision,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Mistral3ForConditionalGeneration": _mistral3,
}
"""By architecture."""
