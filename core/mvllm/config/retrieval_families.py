"""Models for retrieval by late interaction, which give a vector for each token: ColQwen2. Needs no torch.

Their config.json holds that of the model below the projection:

    {"architectures": ["ColQwen2ForRetrieval"], "embedding_dim": 128, "vlm_config": {"model_type": "qwen2_vl", ...}}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from mvllm.config.grid_families import GRID_FAMILIES
from mvllm.config.hf_config import HFConfig
from mvllm.config.model_kind import RETRIEVAL_ARCHITECTURES
from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import ModelError

_INNER = "vlm_config"
_OUTER_ONLY = ("architectures", "transformers_version")
_QWEN2_VL = ("qwen2_vl", "qwen2_vl_text")


def with_inner_config(outer: HFConfig) -> HFConfig:
    """A config.json with the values of its `vlm_config` at the top level; others are returned as they are.

    Raises:
        ModelError: `vlm_config` is not an object.
    """
    if _INNER not in outer or outer.get("architectures") not in [[name] for name in RETRIEVAL_ARCHITECTURES]:
        return outer
    inner = {key: value for key, value in outer.require(_INNER, dict).items() if key not in _OUTER_ONLY}
    own = {key: value for key, value in outer.as_dict().items() if key not in (_INNER, "model_type")}
    return HFConfig({**inner, **own}, outer.source)


def _colqwen2(hf_config: HFConfig) -> MultiModalModel | None:
    model_type = hf_config.get("model_type")
    if model_type not in _QWEN2_VL:
        raise ModelError(f"{hf_config.source}: the model in 'vlm_config' should be a qwen2_vl, found {model_type!r}.")
    found = GRID_FAMILIES["Qwen2VLForConditionalGeneration"](hf_config)
    if found is None:
        return None
    positions = hf_config.get("image_positions", "sequence")
    if positions not in ("sequence", "grid"):
        raise ModelError(f"{hf_config.source}: 'image_positions' should be 'sequence' or 'grid', found {positions!r}.")
    return dataclasses.replace(
        found,
        placeholders={"image": found.placeholders["image"]},
        rope_sections=found.rope_sections if positions == "grid" else None,
    )


RETRIEVAL_FAMILIES: Mapping[str, Callable[[HFConfig], MultiModalModel | None]] = {"ColQwen2ForRetrieval": _colqwen2}
"""By architecture."""
