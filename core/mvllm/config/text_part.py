"""The `text_config` of multimodal checkpoints, which leaves out values that are transformers' defaults.

Checkpoints that are language models alone list them.
"""

from __future__ import annotations

from typing import Any

from mvllm.config.families import find_model_type
from mvllm.config.hf_config import HFConfig


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
