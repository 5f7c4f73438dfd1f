"""Configs within a config.json: what they leave out, and which of their values count.

Multimodal checkpoints have the values of their language model in `text_config`, without those that are transformers'
defaults; checkpoints that are language models alone list them. Models for retrieval by late interaction, which give a
vector for each token, have those of the model below the projection in `vlm_config`:

    {"architectures": ["ColQwen2ForRetrieval"], "embedding_dim": 128, "vlm_config": {"model_type": "qwen2_vl", ...}}
"""

from __future__ import annotations

from typing import Any

from mvllm.config.families import find_architecture, find_model_type
from mvllm.config.hf_config import HFConfig

_INNER = "vlm_config"
_OUTER_ONLY = ("architectures", "transformers_version")


def with_inner_config(outer: HFConfig) -> HFConfig:
    """A config.json with the values of its `vlm_config` at the top level; others are returned as they are.

    Raises:
        ModelError: `vlm_config` is not an object.
    """
    names = outer.get("architectures")
    if _INNER not in outer or not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return outer
    found = find_architecture(names[0])
    if found is None or not found.gives_token_vectors:
        return outer
    inner = {key: value for key, value in outer.require(_INNER, dict).items() if key not in _OUTER_ONLY}
    own = {key: value for key, value in outer.as_dict().items() if key not in (_INNER, "model_type")}
    return HFConfig({**inner, **own}, outer.source)


def text_part_values(outer: HFConfig, text: dict[str, Any]) -> dict[str, Any]:
    """The values of `text_config` of a multimodal config, with those that it leaves out.

    Args:
        outer: The whole config.
        text: Its `text_config`.
    """
    family = find_model_type(outer)
    if family.text_type is None:
        return text
    named = {"model_type": family.text_type, **text}
    return {**find_model_type(named).text_defaults, **family.text_defaults, **named}


def is_tied_by_text(outer: HFConfig, text: dict[str, Any]) -> bool:
    """Whether `text_config` ties the head, whatever the whole config says."""
    return text.get("tie_word_embeddings") is True and find_model_type(outer).tied_by_text
