"""Rows of items (images, audio, embeddings) as inputs of a step with static shapes.

    tokens            a  P  P  P  b  .    the P's take rows of an image, the last one is padding
    item_index       -1  0  1  2 -1 -1    [T], the row that each token takes
    item_embeds      [T, width]           the rows of the step, padded
    rope_positions   [3, T]               of models with three-dimensional positions

The shapes depend on the padded number of tokens alone, so steps with and without items run the same programs. Encoders
are not part of them: their shapes are those of the images, and they run on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mvllm.config.multimodal import MultiModalModel
from mvllm.platform.runtime import DeviceRuntime
from mvllm.worker.encoder_runner import StepItemTensors
from mvllm.worker.step_inputs import StepInputs


@dataclass(frozen=True)
class ItemInputSpec:
    """The items that a model's prompts may have, whose rows take the places of embeddings.

    Attributes:
        width: Elements of a row of `item_embeds`.
        has_rope_positions: Tokens have three rotary positions.
    """

    width: int
    has_rope_positions: bool

    @classmethod
    def of(cls, model: MultiModalModel | None) -> ItemInputSpec | None:
        """Those of a model, as `items_of` gives it; None for text alone."""
        return None if model is None else cls(model.embedding_width, model.rope_sections is not None)


class StaticItemInputs:
    """Places the items of steps on the device.

    Keeps the arrays that steps without rows read there, for each padded number of tokens.

    Args:
        items: The items of the model.
        dtype: The compute dtype.
        runtime: The bound device.
        has_rows: Whether this is the first pipeline stage, which reads embeddings.
    """

    def __init__(self, items: ItemInputSpec, dtype: torch.dtype, runtime: DeviceRuntime, *, has_rows: bool) -> None:
        self._items, self._dtype, self._runtime, self._has_rows = items, dtype, runtime, has_rows
        self._no_rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def arguments(self, items: StepItemTensors | None, inputs: StepInputs) -> tuple[torch.Tensor, ...]:
        """The arguments of the model's compiled function behind the metadata of a step.

        Args:
            items: Of the step, on the host; None if it reads none.
        """
        found: list[torch.Tensor] = []
        if self._has_rows:
            found += self._rows(items, len(inputs.token_ids))
        if self._items.has_rope_positions:
            given = None if items is None else items.rope_positions
            assert inputs.host_positions is not None
            host = inputs.host_positions[None].repeat(3, axis=0) if given is None else given.numpy()
            found.append(self._runtime.from_numpy(host))
        return tuple(found)

    def fields(self, arguments: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The fields of ForwardStep for a step whose `arguments` these are. Called in the compiled function."""
        found = {"item_index": arguments[0], "item_embeds": arguments[1]} if self._has_rows else {}
        if self._items.has_rope_positions:
            found["rope_positions"] = arguments[-1]
        return found

    def _rows(self, items: StepItemTensors | None, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`item_index` and `item_embeds` of a step."""
        rows = None if items is None else items.item_embeds
        if rows is None and (kept := self._no_rows.get(num_tokens)) is not None:
            return kept
        index = np.full(num_tokens, -1, dtype=np.int32)
        embeds = torch.zeros((num_tokens, self._items.width), dtype=self._dtype)
        if items is not None and rows is not None:
            assert items.item_indices is not None
            index[items.item_indices.numpy()] = np.arange(len(rows), dtype=np.int32)
            embeds[: len(rows)] = rows
        found = self._runtime.from_numpy(index), self._runtime.to_device(embeds)
        if rows is None:
            self._no_rows[num_tokens] = found
        return found
