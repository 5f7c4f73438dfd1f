"""LoRA for linear layers: adapter slots, and a wrapper of the linear op that adds the adapters' results.

A model is built and loaded as without LoRA, quantized or not. Then each layer's linear op is wrapped: the wrapper calls
it and adds up · (down · x) for the tokens that have an adapter. In a step without adapters it adds nothing.

Adapters are sharded like the layer. Column parallel: `down` is whole, `up` is sharded by rows. Row parallel: `down` is
sharded by columns, `up` is whole, and the added value is a summand of the sum over ranks. With several checkpoint
matrices in one layer (QKV, gate and up), each has its own `down` block and its rows of `up`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mvllm.errors import ConfigError
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import Linear
from mvllm.layers.matrix_layout import Part
from mvllm.layers.quantization.quantized_matrix import Product


@dataclass(frozen=True)
class LoRAMapping:
    """The adapter of each token of a step.

    Attributes:
        tokens, segments: As in the operation `add_lora`.
        slots: int32 [T], device, as in the operation `add_lora_by_slot`: the slot of each token's adapter, -1 for none;
            None if no layer reads it.
    """

    tokens: torch.Tensor | None
    segments: tuple[tuple[int, int, int], ...]
    slots: torch.Tensor | None = None

    @property
    def is_on_device(self) -> bool:
        """Whether the layers need nothing but `slots`, so that the step's work depends on its shape alone."""
        return self.slots is not None and self.tokens is None and not self.segments


class CurrentLoRAMapping:
    """The LoRA mapping of the current step, which all layers read.

    Attributes:
        batch: None in a step without adapters.
    """

    batch: LoRAMapping | None = None

    @contextmanager
    def active(self, batch: LoRAMapping) -> Iterator[None]:
        """Sets the mapping inside the context."""
        self.batch = batch
        try:
            yield
        finally:
            self.batch = None


@dataclass(frozen=True)
class LoRALayerWeights:
    """One adapter's matrices for one checkpoint matrix, unsharded, on the host, in the compute dtype.

    Attributes:
        down: [r, in_features].
        up: [out_features, r], multiplied by the adapter's scale.
    """

    down: torch.Tensor
    up: torch.Tensor


class StackedLoRAWeights:
    """The adapter slots of one linear layer on the device.

    Args:
        linear: The layer, with its weights loaded. Its linear op is wrapped.
        ctx: The build context of the model.
        step: The current LoRA mapping.
        num_slots: Number of adapter slots.
        max_rank: Largest rank of an adapter.
        only_by_slot: Use `add_lora_by_slot` whoever provides it, for models that run as graphs.

    Attributes:
        arrays: `lora_down` and `lora_up`, as `down` and `up` of the operations.
        shapes: (out_features, in_features) of the whole checkpoint matrices, by module name.
        by_slot: Whether the layer uses the operation `add_lora_by_slot`, so that it needs `LoRAMapping.slots`.
    """

    def __init__(
        self,
        linear: Linear,
        ctx: BuildContext,
        step: CurrentLoRAMapping,
        num_slots: int,
        max_rank: int,
        *,
        only_by_slot: bool = False,
    ) -> None:
        layout = linear.layout
        self._layout = layout
        self.shapes = {part.name: (part.num_rows, layout.in_features) for part in layout.parts}
        self._blocks = {name: block for block, name in enumerate(self.shapes)}
        num_blocks, columns, rows = len(self._blocks), layout.num_columns, layout.out_features
        bands = tuple((p.destination.start, p.destination.stop, self._blocks[p.name]) for p in layout.parts)
        self._down = torch.zeros(num_slots, num_blocks, max_rank, columns, dtype=ctx.dtype, device=ctx.device)
        self._up = torch.zeros(num_slots, rows, max_rank, dtype=ctx.dtype, device=ctx.device)
        self.arrays = {"lora_down": self._down, "lora_up": self._up}
        facts = {"in_features": columns, "out_features": rows, "rank": max_rank, "blocks": num_blocks}
        by_segment, by_slot = ctx.op("add_lora", **facts), ctx.op("add_lora_by_slot", **facts)
        self.by_slot = (only_by_slot or by_slot.may_replace(by_segment)) and _covers(bands, rows)
        if only_by_slot and not self.by_slot:
            raise ConfigError(
                f"LoRA is not supported for the layer with {', '.join(self.shapes)} in a model that runs as a graph: "
                "its checkpoint matrices do not fill its rows in order. Merge the adapter into the model's weights."
            )
        down, up = self._down, self._up

        def add(y: torch.Tensor, x: torch.Tensor, batch: LoRAMapping) -> torch.Tensor:
            if self.by_slot:
                return by_slot(y, x, down, up, batch.slots, bands)
            return by_segment(y, x, down, up, batch.tokens, batch.segments, bands)

        def around(product: Product) -> Product:
            def with_adapters(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
                y = product(x, weight, bias)
                return y if step.batch is None else add(y, x, step.batch)

            return with_adapters

        linear.wrap_linear_op(around)

    def set_lora(self, slot: int, adapter: dict[str, LoRALayerWeights]) -> None:
        """Copies an adapter to a slot.

        Args:
            slot: The slot; its previous contents are overwritten.
            adapter: Its matrices by module name. Modules of other layers are ignored; missing ones add nothing.
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


def _covers(bands: tuple[tuple[int, int, int], ...], num_rows: int) -> bool:
    """Whether the bands follow each other and end at the last row."""
    starts, stops = [band[0] for band in bands], [band[1] for band in bands]
    return starts == [0, *stops[:-1]] and stops[-1] == num_rows
