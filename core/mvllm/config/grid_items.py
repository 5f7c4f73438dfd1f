"""Reads what models with grids of patches take beside text: Qwen-VL and GLM-4V. Needs no torch.

Their images and videos are grids of patches, frames x rows x columns, and their language models read three positions
for each token: temporal, height and width.
"""

from __future__ import annotations

from collections.abc import Callable

from mvllm.config.encoder_parts import vision_config
from mvllm.config.hf_config import HFConfig
from mvllm.config.model_family import ReadItems
from mvllm.config.multimodal import MultiModalModel
from mvllm.config.rope_parameters import rope_settings
from mvllm.errors import ModelError

_VIDEO_AS_IMAGES = "<|begin_of_video|><|video|><|end_of_video|>"


def grid_items_reader(
    image_id: int,
    video_id: int | None,
    sections: tuple[int, int, int],
    *,
    interleaved: bool = False,
    further_rows: Callable[[HFConfig], int] = lambda vision: 0,
) -> ReadItems:
    """The reader of a family.

    Args:
        image_id, video_id: Defaults of the token ids. None: the frames of videos are marked as images are.
        sections: Default of `mrope_section`.
        interleaved: As `rope_interleaved`.
        further_rows: Rows of an embedding beside the first one, by `vision_config`.
    """

    def read(hf_config: HFConfig) -> MultiModalModel | None:
        vision = vision_config(hf_config)
        if vision is None:
            return None
        image = _token_id(hf_config, "image_token_id", image_id)
        video = image if video_id is None else _token_id(hf_config, "video_token_id", video_id)
        return MultiModalModel(
            placeholders={"image": image, "video": video},
            embedding_width=(1 + further_rows(vision)) * hf_config.positive_int("hidden_size"),
            rope_sections=_sections(hf_config, sections),
            rope_interleaved=interleaved,
            written_as={"video": _VIDEO_AS_IMAGES} if video_id is None else {},
        )

    return read


def _token_id(hf_config: HFConfig, key: str, default: int) -> int:
    value = hf_config.get(key, default)
    size = hf_config.positive_int("vocab_size")
    if type(value) is not int or not 0 <= value < size:
        raise ModelError(f"{hf_config.source}: {key!r} should be a token id below {size}, found {value!r}.")
    return value


def _sections(hf_config: HFConfig, default: tuple[int, int, int]) -> tuple[int, int, int]:
    found = rope_settings(hf_config).get("mrope_section", list(default))
    if not isinstance(found, list) or len(found) != 3 or not all(type(size) is int and size >= 0 for size in found):
        raise ModelError(f"{hf_config.source}: 'mrope_section' should be a list of three numbers, found {found!r}.")
    return found[0], found[1], found[2]
