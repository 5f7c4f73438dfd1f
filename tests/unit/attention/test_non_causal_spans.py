"""Non-causal spans: `visible_lens` and a window are transformers' masks for images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from mvllm.errors import PlatformError
from mvllm.messages.multimodal import ItemSpan
from mvllm.platform.checked_calls import checked_attention_backend
from mvllm.worker.non_causal_spans import NonCausalSpans
from tests.unit.attention.specs import make_spec
from tests.unit.worker.fake_platform import FakePlatform

LENGTH, WINDOW = 40, 6
RUNS = [(2, 14), (15, 17), (20, 37)]
"""Positions of images: longer and shorter than the window."""


def transformers_masks() -> dict[str, torch.Tensor]:
    """Which key (column) each query (row) sees, for layers without and with a window."""
    config = Gemma3TextConfig(
        hidden_size=8, num_attention_heads=1, num_hidden_layers=2, head_dim=8, sliding_window=WINDOW
    )
    config._attn_implementation = "eager"
    types = torch.zeros(1, LENGTH, dtype=torch.long)
    for start, stop in RUNS:
        types[0, start:stop] = 1
    masks = create_masks_for_vision_model(
        config=config,
        inputs_embeds=torch.zeros(1, LENGTH, 8),
        attention_mask=torch.ones(1, LENGTH, dtype=torch.long),
        past_key_values=None,
        position_ids=torch.arange(LENGTH)[None],
        block_sequence_ids=get_block_sequence_ids_for_mask(types),
    )
    return {name: mask[0, 0] == 0 for name, mask in masks.items()}


def test_visible_lens_and_the_window_are_the_masks_of_transformers() -> None:
    spans = NonCausalSpans()
    spans.set_row(
        0, [ItemSpan(bytes(32), start - 1, stop - start + 2, [(1, stop - start + 1)]) for start, stop in RUNS]
    )
    found = spans.visible_lens(np.array([0]), np.array([0]), np.array([LENGTH]), LENGTH)
    assert found is not None
    keys, queries = torch.arange(LENGTH)[None], torch.arange(LENGTH)[:, None]
    visible = keys < torch.from_numpy(found)[:, None]
    masks = transformers_masks()
    assert torch.equal(visible, masks["full_attention"])
    assert torch.equal(visible & (keys > queries - WINDOW), masks["sliding_attention"])


def test_platforms_that_do_not_claim_them_are_not_asked() -> None:
    with pytest.raises(PlatformError, match=r"needs non_causal_spans, which the platform .* does not support"):
        checked_attention_backend(FakePlatform(), make_spec(4, 2, 16, non_causal_spans=True))


def test_sparse_attention_has_no_spans() -> None:
    spec = make_spec(4, 1, 16, value_head_size=16, values_in_keys=True, index_topk=4, non_causal_spans=True)
    assert "sparse attention is causal" in spec.contradictions()
