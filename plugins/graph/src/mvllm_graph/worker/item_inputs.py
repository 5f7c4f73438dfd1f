"""Rows of items (images, audio, embeddings) as inputs of a graph.

    tokens            a  P  P  P  b       the P's take rows of an image
    item_index       -1  0  1  2 -1       the row of item_embeds, -1 for none
    item_embeds      [N, width]           the rows of the step
    rope_positions   [T, 3]               of models with three-dimensional positions

One graph serves all steps. Steps without items, all decode steps among them, have as few rows as there are sizes for:
what a graph adds for items is then a few array operations on the embeddings.
"""

from __future__ import annotations

import numpy as np
import torch

from mvllm.extension_api.worker import ItemInputSpec, StepItemTensors
from mvllm.plugin_api import ShapePolicy
from mvllm_graph.arrays import to_numpy


class ItemInputs:
    """The inputs of a graph that are about items.

    Args:
        items: The items of the graph.
        dtype: The compute dtype.
        shapes: The platform's buckets. N is padded to those of tokens.
        is_static: The platform has static shapes: N is T.
        has_rows: Whether the graph is that of the first pipeline stage, which reads embeddings.
    """

    def __init__(
        self, items: ItemInputSpec, dtype: torch.dtype, shapes: ShapePolicy, *, is_static: bool, has_rows: bool
    ) -> None:
        self._items, self._dtype, self._shapes = items, dtype, shapes
        self._is_static, self._has_rows = is_static, has_rows
        self._no_rows: dict[int, np.ndarray] = {}

    def arrays(self, items: StepItemTensors | None, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs of a step by name.

        Args:
            items: Of the step, on the host; None if it reads none.
            positions: int32 [T], padding included.
        """
        found: dict[str, np.ndarray] = {}
        if self._items.has_rope_positions:
            given = None if items is None else items.rope_positions
            rows = positions[None].repeat(3, axis=0) if given is None else given.numpy()
            found["rope_positions"] = np.ascontiguousarray(rows.T)
        if self._has_rows:
            found["item_index"], found["item_embeds"] = self._rows(items, len(positions))
        return found

    def _rows(self, items: StepItemTensors | None, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """`item_index` and `item_embeds` of a step."""
        index = np.full(num_tokens, -1, dtype=np.int32)
        if items is None or items.item_embeds is None or items.item_indices is None:
            size = self._padded(1, num_tokens)
            if size not in self._no_rows:
                self._no_rows[size] = to_numpy(torch.zeros((size, self._items.width), dtype=self._dtype))
            return index, self._no_rows[size]
        embeds = items.item_embeds
        index[items.item_indices.numpy()] = np.arange(len(embeds), dtype=np.int32)
        if missing := self._padded(len(embeds), num_tokens) - len(embeds):
            embeds = torch.cat([embeds, embeds.new_zeros((missing, self._items.width))])
        return index, to_numpy(embeds)

    def _padded(self, num_rows: int, num_tokens: int) -> int:
        return num_tokens if self._is_static else ShapePolicy.pad(num_rows, self._shapes.tokens)
