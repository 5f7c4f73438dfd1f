"""The rows of items as inputs of a graph: their sizes in steps with and without items."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mvllm.platform.shapes import ShapePolicy
from mvllm.worker.encoder_runner import StepItemTensors
from mvllm_graph.trace import ItemInputSpec
from mvllm_graph.worker.item_inputs import ItemInputs

POSITIONS = np.arange(6, dtype=np.int32)


def inputs_of(tokens: tuple[int, ...] | None, *, is_static: bool = False, has_rows: bool = True) -> ItemInputs:
    shapes = ShapePolicy(tokens=tokens)
    return ItemInputs(ItemInputSpec(4, True), torch.bfloat16, shapes, is_static=is_static, has_rows=has_rows)


@pytest.mark.parametrize(
    ("tokens", "is_static", "sizes"), [(None, False, (1, 3)), ((4, 8), False, (4, 4)), ((6,), True, (6, 6))]
)
def test_rows_are_padded_as_tokens_are(tokens: tuple[int, ...] | None, is_static: bool, sizes: tuple[int, int]) -> None:
    inputs = inputs_of(tokens, is_static=is_static)
    embeds = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    items = StepItemTensors(torch.tensor([1, 2, 4]), embeds, torch.arange(18, dtype=torch.int32).reshape(3, 6))
    without, found = inputs.arrays(None, POSITIONS), inputs.arrays(items, POSITIONS)
    assert without["item_index"].tolist() == [-1] * 6 and not without["item_embeds"].any()
    assert without["rope_positions"].tolist() == [[i, i, i] for i in range(6)]
    assert found["item_index"].tolist() == [-1, 0, 1, -1, 2, -1]
    assert found["rope_positions"].tolist() == [[i, i + 6, i + 12] for i in range(6)]
    assert (len(without["item_embeds"]), len(found["item_embeds"])) == sizes
    rows = torch.from_numpy(found["item_embeds"]).view(torch.bfloat16)
    assert torch.equal(rows[:3], embeds) and not rows[3:].any()


def test_later_pipeline_stages_have_rotary_positions_only() -> None:
    assert list(inputs_of(None, has_rows=False).arrays(None, POSITIONS)) == ["rope_positions"]
