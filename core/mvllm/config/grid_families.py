"""What Qwen2-VL, Qwen2.5-VL, Qwen3-VL and GLM-4V take beside text. Needs no torch.

Their images and videos are grids of patches, frames x rows x columns, and their language models read three positions
for each token: temporal, height and width.
"""

from __future__ import annotations

from collections.abc import Callable

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.config.rope_parameters import rope_settings
from mvllm.config.vision_families import vision_config
from mvllm.errors import ModelError


def deepstack_layers(vision: HFConfig) -> tuple[int, ...]:
    """The layers of Qwen3-VL's vision tower whose results are added behind the first layers of the language model.

    Raises:
        ModelError: `deepstack_visual_indexes` is not a list of different numbers of layers.
    """
    layers = vision.get("deepstack_visual_indexes", [8, 16, 24])
    depth = vision.positive_int("depth", 27)
    if (
        not isinstance(layers, list)
        or not all(type(layer) is int and 0 <= layer < depth for layer in layers)
        or len(set(layers)) != len(layers)
    ):
        raise ModelError(
            f"{vision.source}: 'deepstack_visual_indexes' should be a list of different numbers below {depth}, found "
            f"{layers!r}."
        )
    return tuple(layers)


_VIDEO_AS_IMAGES = "<|begin_of_video|><|video|><|end_of_video|>"


def _family(
    image_id: int, video_id: int | None, sections: tuple[int, int, int], *, interleaved: bool = False
) -> Callable[[HFConfig], MultiModalModel | None]:
    """Args:
    image_id, video_id: Defaults of the token ids. None: the frames of videos are marked as images are.
    sections: Default of `mrope_section`.
    interleaved: As `rope_interleaved`; such families have DeepStack.
    """

    def read(hf_config: HFConfig) -> MultiModalModel | None:
        vision = vision_config(hf_config)
        if vision is None:
            return None
        image = _token_id(hf_config, "image_token_id", image_id)
        video = image if video_id is None else _token_id(hf_config, "video_token_id", video_id)
        streams = 1 + (len(deepstack_layers(vision)) if interleaved else 0)
        return MultiModalModel(
            placeholders={"image": image, "video": video},
            embedding_width=streams * hf_config.positive_int("hidden_size"),
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


_QWEN2 = _family(151655, 151656, (16, 24, 24))
_QWEN3 = _family(151655, 151656, (24, 20, 20), interleaved=True)
_GLM = _family(151343, None, (8, 12, 12))

GRID_FAMILIES = {
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
    "Glm4vForConditionalGeneration": _GLM,
    "Glm46VForConditionalGeneration": _GLM,
    "Glm4vMoeForConditionalGeneration": _family(151363, None, (8, 12, 12)),
}
"""By architecture."""
