"""Families that generate images: the defaults of their configs, their token spaces, and the formats of their images.

Published configs list only the values that differ from transformers' defaults, which the tables here repeat.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mvllm.extension_api import HFConfig, ModelConfig, ModelError
from mvllm.extension_api.model_families import Architecture, ModelFamily, ModelType, TokenSpace

IMAGE = "image"
"""Name of the token space of these families."""


@dataclass(frozen=True)
class ImageFormat:
    """How a model writes an image as tokens.

    Attributes:
        rows, columns: Codes of an image; for models that let choose the size, of an image of the default size.
        scale: Pixels per code, along each side.
        guidance_scale: The default of ImageParams.
        chat_prompt: A prompt is a chat message: the format of that message for tokenizers without a chat template.
            None for models that take the text as it is.
        names_size: The prompt names the number of rows and columns, which may be chosen.
        begin_token_ids: The tokens that begin an image. If the prompt names the size, it is between the two.
        row_end_id: The token at the end of each row; None for models without.
    """

    rows: int
    columns: int
    scale: int
    guidance_scale: float
    chat_prompt: str | None = None
    names_size: bool = False
    begin_token_ids: tuple[int, ...] = ()
    row_end_id: int | None = None

    def num_tokens(self, rows: int, columns: int) -> int:
        """Tokens of an image."""
        return rows * (columns + (self.row_end_id is not None))


_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_EMU3 = {
    "vocab_size": 184622,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 9216,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 151643,
    "bos_token_id": 151849,
    "eos_token_id": 151850,
}
_EMU3_ROPE_THETA = 1e6


def with_rope(values: dict[str, Any]) -> dict[str, Any]:
    """The values of `text_config` of Emu3, whose default base of RoPE is not that of other models."""
    return values if {"rope_parameters", "rope_theta"} & values.keys() else {**values, "rope_theta": _EMU3_ROPE_THETA}


def janus_spaces(hf_config: HFConfig, vocab_size: int, generation: HFConfig) -> dict[str, TokenSpace]:
    """The codes of images, behind the vocabulary of text.

    `boi_token_id` and `pad_token_id` of generation_config.json are the token that begins an image, and the one that
    replaces the prompt in the unconditional prompt.
    """
    vq, vision = (_object(hf_config, key) for key in _JANUS_PARTS)
    begin = _token_id(generation, "boi_token_id", vocab_size)
    if begin is None:
        begin = _token_id(_object(generation, "generation_kwargs"), "boi_token_id", vocab_size)
    pad = _token_id(generation, "pad_token_id", vocab_size)
    return {
        IMAGE: TokenSpace(
            IMAGE,
            first=vocab_size,
            size=vq.positive_int("num_embeddings", 16384),
            num_tokens=vision.positive_int("num_image_tokens", 576),
            begin_token_ids=() if begin is None else (begin,),
            pad_token_id=_token_id(hf_config, "pad_token_id", vocab_size) if pad is None else pad,
        )
    }


JANUS_MULTIPLIERS, EMU3_MULTIPLIERS = (1, 1, 2, 2, 4), (1, 2, 2, 4)
"""Defaults of `channel_multiplier`."""

_JANUS_PARTS = ("vq_config", "vision_config")
_JANUS_CHAT = "<|User|>: {}\n\n<|Assistant|>:"


def image_space(config: ModelConfig) -> TokenSpace:
    """The space of image codes of a model.

    Raises:
        ModelError: It has none.
    """
    space = config.token_spaces.get(IMAGE)
    if space is None:
        raise ModelError(
            f"{config.hf_config.source}: the architecture {config.architecture} needs the token space {IMAGE!r}, found "
            f"{sorted(config.token_spaces)}. Declare it with 'token_spaces'."
        )
    return space


def janus_format(config: ModelConfig) -> ImageFormat:
    """Images are squares of the one size that the model was trained on.

    Raises:
        ModelError: The number of codes is not a square, or there is no space of codes.
    """
    hf_config, space = config.hf_config, image_space(config)
    count = space.num_tokens or 0
    side = math.isqrt(count)
    if side * side != count or not count:
        raise ModelError(
            f"{hf_config.source}: 'num_image_tokens' of 'vision_config' is {count}, which is no square: an image has "
            "as many rows as columns of codes."
        )
    vq = HFConfig(hf_config.get("vq_config", {}), f"{hf_config.source}: 'vq_config'")
    return ImageFormat(
        rows=side,
        columns=side,
        scale=2 ** (len(channel_multipliers(vq, JANUS_MULTIPLIERS)) - 1),
        guidance_scale=5.0,
        chat_prompt=_JANUS_CHAT,
        begin_token_ids=space.begin_token_ids,
    )


def channel_multipliers(vq: HFConfig, default: Sequence[int]) -> Sequence[int]:
    """The widths of the levels of a VQ decoder, as multiples. Each level but the last one doubles height and width.

    Args:
        vq: The object `vq_config`.
        default: Of the family.

    Raises:
        ModelError: They are not a list of integers above 0.
    """
    found = vq.get("channel_multiplier") or default
    if not isinstance(found, Sequence) or not all(type(each) is int and each > 0 for each in found):
        raise ModelError(
            f"{vq.source}: 'channel_multiplier' should be a list of integers above 0, found {found!r:.80}."
        )
    return found


def image_format(config: ModelConfig) -> ImageFormat | None:
    """The format of a model's images; None if it generates none."""
    read = FORMATS.get(config.architecture)
    return None if read is None else read(config)


_VISUAL_TOKEN = re.compile(r"<\|visual token (\d+)\|>")
_BEGIN, _WRAPPER, _ROW_END = "<|image start|>", "<|image token|>", "<|extra_200|>"
_VISUAL_TOKENS = "visual_tokens"
_EMU3_SIDE = 90


def shorten_vocabulary_map(config: dict[str, Any], source: str) -> None:
    """Replaces the tokenizer's vocabulary in a config of Emu3, megabytes, by what is needed of it: the tokens around
    images, and the id of code 0 and the number of codes as `visual_tokens`.

    Raises:
        ModelError: The ids of the codes are not contiguous.
    """
    vocabulary = config.get("vocabulary_map")
    if not isinstance(vocabulary, dict):
        return
    codes = {int(match[1]): ids for name, ids in vocabulary.items() if (match := _VISUAL_TOKEN.fullmatch(name))}
    first = codes.get(0)
    if first is None or any(codes.get(code) != first + code for code in range(len(codes))):
        raise ModelError(
            f"{source}: 'vocabulary_map' has {len(codes)} tokens like '<|visual token 000000|>', whose ids are not "
            "contiguous. Only contiguous ids are supported."
        )
    config["vocabulary_map"] = {name: vocabulary[name] for name in (_BEGIN, _WRAPPER, _ROW_END) if name in vocabulary}
    config[_VISUAL_TOKENS] = [first, len(codes)]


def emu3_spaces(hf_config: HFConfig, vocab_size: int, generation: HFConfig) -> dict[str, TokenSpace]:
    """The codes of images, which are a part of the vocabulary.

    Raises:
        ModelError: The config has no `vocabulary_map`.
    """
    first, size = hf_config.require(_VISUAL_TOKENS if _VISUAL_TOKENS in hf_config else "vocabulary_map", list)
    return {IMAGE: TokenSpace(IMAGE, first=first, size=size, has_own_head=False)}


def emu3_format(config: ModelConfig) -> ImageFormat:
    """Images of any size, of 720 x 720 pixels by default, whose rows end with a token.

    Raises:
        ModelError: `vocabulary_map` lacks a token.
    """
    hf_config = config.hf_config
    vocabulary = hf_config.get("vocabulary_map", {})
    ids = [vocabulary.get(name) for name in (_BEGIN, _WRAPPER, _ROW_END)]
    if not all(type(each) is int and 0 <= each < config.vocab_size for each in ids):
        raise ModelError(
            f"{hf_config.source}: 'vocabulary_map' needs the ids of {_BEGIN}, {_WRAPPER} and {_ROW_END}, found {ids}."
        )
    vq = HFConfig(hf_config.get("vq_config", {}), f"{hf_config.source}: 'vq_config'")
    return ImageFormat(
        rows=_EMU3_SIDE,
        columns=_EMU3_SIDE,
        scale=2 ** (len(channel_multipliers(vq, EMU3_MULTIPLIERS)) - 1),
        guidance_scale=3.0,
        names_size=True,
        begin_token_ids=(ids[0], ids[1]),
        row_end_id=ids[2],
    )


def _object(config: HFConfig, key: str) -> HFConfig:
    """An object within a config; empty if it is absent."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"{config.source}: {key!r} should be a JSON object, found {value!r:.80}.")
    return HFConfig(value or {}, f"{config.source}: {key!r}")


def _token_id(config: HFConfig, key: str, vocab_size: int) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab_size:
        raise ModelError(f"{config.source}: {key!r} should be a token id below {vocab_size}, found {value!r}.")
    return value


FORMATS: dict[str, Callable[[ModelConfig], ImageFormat]] = {
    "Emu3ForConditionalGeneration": emu3_format,
    "JanusForConditionalGeneration": janus_format,
}
"""Readers of the formats of images, by architecture."""

_MODELS = "mvllm_image_generation.models"
FAMILY = ModelFamily(
    architectures={
        "Emu3ForConditionalGeneration": Architecture(
            f"{_MODELS}.emu3:Emu3ForConditionalGeneration", read_spaces=emu3_spaces
        ),
        "JanusForConditionalGeneration": Architecture(
            f"{_MODELS}.janus:JanusForConditionalGeneration", read_spaces=janus_spaces
        ),
    },
    model_types={
        "emu3": ModelType(
            "Emu3ForConditionalGeneration",
            text_type="emu3_text_model",
            text_defaults=_EMU3,
            simplify=shorten_vocabulary_map,
        ),
        "emu3_text_model": ModelType(never_sliding=True, read_config=with_rope),
        "janus": ModelType("JanusForConditionalGeneration", text_type="llama", text_defaults=_LLAMA),
    },
)
