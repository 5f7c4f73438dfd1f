"""Processed items in tests: their features as arrays, and prompts with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mvllm.engine.frontend.prompt_items import expand_prompt_text
from mvllm.messages.multimodal import ArrayData, MultiModalItem
from mvllm.multimodal.processed_item import ProcessedItem
from mvllm.multimodal.prompt_expansion import expand_token_ids, place_items


def as_arrays(features: Mapping[str, ArrayData]) -> dict[str, np.ndarray[Any, Any]]:
    """The features of an item as arrays of numpy. They are not writable."""
    return {
        name: np.frombuffer(each.data, dtype=np.dtype(each.dtype)).reshape(each.shape)
        for name, each in features.items()
    }


def process_prompt(
    prompt: str | Sequence[int], items: Sequence[ProcessedItem], tokenize: Callable[[str], list[int]]
) -> tuple[list[int], list[MultiModalItem]]:
    """The token ids of a prompt with its items, and the items with their spans, by rising offset.

    Args:
        prompt: A text or token ids.
        items: Those of each modality in their order.
        tokenize: The tokenizer of texts.
    """
    if isinstance(prompt, str):
        text, ordered = expand_prompt_text(prompt, items)
        ids = tokenize(text)
    else:
        ids, ordered = expand_token_ids(prompt, items)
    return ids, place_items(ids, ordered)
