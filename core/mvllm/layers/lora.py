"""LoRA beside the linear layers: slots for adapters, and a product that adds what they say.

The idea: a layer's product is a function, so an adapter is another function around it. A model is built and loaded as
without adapters, whatever its weights are made of; then each linear layer's product is replaced by one that first calls
the old one, and then adds up · (down · x) for the tokens that have an adapter. In a step without them it just returns.

Adapters are cut as the layer is. Column parallel: `down` whole, `up` by rows. Row parallel: `down` by columns, `up`
whole, and what is added is a part of the sum over ranks. Several checkpoint matrices in one product (QKV, gate and up):
each has its own `down`, side by side, and its rows of `up`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mvllm.layers.context import BuildContext
from mvllm.layers.linear import Linear
from mvllm.layers.matrix_layout import Part
from mvllm.layers.quantization.quantized_matrix import Product


@dataclass(frozen=True)
class LoRAMapping:
    """Which tokens of a step have which adapter; the fields as the operation `add_lora` takes them."""

    tokens: torch.Tensor | None
    segments: tuple[tuple[int, int, int], ...]


class CurrentLoRAMapping:
    """What the layers are told about the step under way.

    Attributes:
        batch: None in a step without adapters.
    """

    batch: LoRAMapping | None = None

    @contextmanager
    def active(self, batch: LoRAMapping) -> Iterator[None]:
        """Has the layers add what `batch` says, within."""
        self.batch = batch
        try:
            yield
        finally:
            self.batch = None


@dataclass(frozen=True)
class LoRALayerWeights:
    """One adapter's matrices for one checkpoint matrix, whole, on the host, in the compute dtype.

    Attributes:
        down: [r, in_features].
        up: [out_features, r], with the adapter's scale in it.
    """

    down: torch.Tensor
    up: torch.Tensor


class StackedLoRAWeights:
    """The adapters of one linear layer, as many as may be on the device.

    Args:
        linear: The layer, with its weights loaded. Its product adds adapters from now on.
        ctx: The build context of the model.
        step: Tells what to add.
        num_slots: How many adapters there may be.
        max_rank: Largest rank of one.

    Attributes:
        shapes: (out_features, in_features) of the whole checkpoint matrices, by module name.
    """

    def __init__(
        self, linear: Linear, ctx: BuildContext, step: CurrentLoRAMapping, num_slots: int, max_rank: int
    ) -> None:
        layout = linear.layout
        self._layout = layout
        self.shapes = {part.name: (part.num_rows, layout.in_features) for part in layout.parts}
        self._blocks = {name: block for block, name in enumerate(self.shapes)}
        num_blocks, columns, rows = len(self._blocks), layout.num_columns, layout.out_features
        bands = tuple((p.destination.start, p.destination.stop, self._blocks[p.name]) for p in layout.parts)
        self._down = torch.zeros(num_slots, num_blocks, max_rank, columns, dtype=ctx.dtype, device=ctx.device)
        self._up = torch.zeros(num_slots, rows, max_rank, dtype=ctx.dtype, device=ctx.device)
        add = ctx.op("add_lora", in_features=columns, out_features=rows, rank=max_rank, blocks=num_blocks).function
        down, up = self._down, self._up

        def around(product: Product) -> Product:
            def with_adapters(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
                y = product(x, weight, bias)
                batch = step.batch
                return y if batch is None else add(y, x, down, up, batch.tokens, batch.segments, bands)

            return with_adapters

        linear.wrap_linear_op(around)

    def set_lora(self, slot: int, adapter: dict[str, LoRALayerWeights]) -> None:
        """Puts an adapter in a slot.

        Args:
            slot: Which one; what was in it is forgotten.
            adapter: Its matrices by module name; modules of other layers, and those that it leaves alone, may differ.
        """
        self._down[slot].zero_()
        self._up[slot].zero_()
        for name, block in self._blocks.items():
            matrices = adapter.get(name)
            if matrices is not None:
                rank = matrices.down.shape[0]
                self._down[slot, block, :rank] = matrices.down[:, self._layout.columns].to(self._down.device)
                for part in self._layout.parts:
                    if part.name == name:
                        self._set_lora_b(slot, part, matrices.up, rank)

    def _set_lora_b(self, slot: int, part: Part, up: torch.Tensor, rank: int) -> None:
        self._up[slot, part.destination, :rank] = up[part.source].to(self._up.device)
