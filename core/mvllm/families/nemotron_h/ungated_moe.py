"""UngatedMoE: experts of two matrices, without a gate, with a separate checkpoint tensor for each matrix.

Tensor parallelism shards every expert along its inner size, as in `fused_moe.py`. Quantized experts stay quantized if
the platform supports `quantized_ungated_moe` (quantized_experts.py). Otherwise experts of a quantized checkpoint are
dequantized after loading, and online quantization does not change experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from mvllm.errors import ModelError
from mvllm.layers.activation import ACTIVATIONS
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import shard_slice
from mvllm.layers.matrix_layout import MatrixLayout, Part
from mvllm.layers.quantization.rtn_matrix import float_targets
from mvllm.layers.quantized_experts import QuantizedExperts, quantized_ungated_moe_op
from mvllm.layers.weight_target import WeightTarget
from mvllm.ops.moe import UNGATED_ACTIVATIONS


class UngatedMoE(nn.Module):
    """Experts down(f(up(x))).

    Args:
        ctx: Build context.
        name: The checkpoint module whose children `0`, `1`, ... are the experts, with up_proj and down_proj.
        hidden_size, intermediate_size: Outer and inner size of one expert.
        act: The activation f, by its name in checkpoints.
        num_experts, top_k: Number of experts, and experts per token.

    Attributes:
        up: [num_experts, size, hidden_size], where `size` is this rank's part of the inner size; after loading the
            result of the op provider's `prepare`. None before that if the experts stay quantized.
        down: [num_experts, hidden_size, size], likewise.
        stays_quantized: Whether the experts' weights are not converted to floats.

    Raises:
        ModelError: The activation is not supported in experts.
    """

    up: Any
    down: Any

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        act: str,
        *,
        num_experts: int,
        top_k: int,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_experts = hidden_size, num_experts
        self._activation = ACTIVATIONS.get(act, act)
        if self._activation not in UNGATED_ACTIVATIONS:
            raise ModelError(
                f"{name}: the activation {act!r} is not supported in experts without a gate. Supported: "
                f"{', '.join(key for key, value in ACTIVATIONS.items() if value in UNGATED_ACTIVATIONS)}."
            )
        band = shard_slice(intermediate_size, ctx.shares, f"inner elements of {name}")
        size, outer = band.stop - band.start, slice(0, hidden_size)
        facts = {"num_experts": num_experts, "top_k": top_k, "hidden_size": hidden_size, "intermediate_size": size}
        self._op = ctx.op("ungated_moe", **facts, activation=self._activation)
        upper = [Part(f"{name}.{e}.up_proj", intermediate_size, band, slice(0, size)) for e in range(num_experts)]
        lower = [Part(f"{name}.{e}.down_proj", hidden_size, outer, outer) for e in range(num_experts)]
        self._layouts = [
            (
                MatrixLayout((of_up,), hidden_size, outer, size, is_expert=True),
                MatrixLayout((of_down,), intermediate_size, band, hidden_size, is_expert=True),
            )
            for of_up, of_down in zip(upper, lower, strict=True)
        ]
        facts = {**facts, "activation": self._activation}
        resolve = partial(quantized_ungated_moe_op, ctx, floats=self._op, facts=facts)
        self._quantized = QuantizedExperts(ctx, self._layouts, resolve)
        self.stays_quantized = self._quantized.op is not None
        if self._quantized.op is not None:
            self._moe, self.up, self.down = self._quantized.op.function, None, None
            return
        self._moe = self._op.function
        self.up = ctx.parameter(num_experts, size, hidden_size)
        self.down = ctx.parameter(num_experts, hidden_size, size)
        for which, parameter in enumerate(("up", "down")):
            if all(self._quantized.matrix(e, which) is not None for e in range(num_experts)):
                # No checkpoint tensor fills it directly.
                floats = getattr(self, parameter).data
                delattr(self, parameter)
                setattr(self, parameter, floats)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As in FusedMoE."""
        return self._moe(x, self.up, self.down, ids, weights, self._activation)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank. Before `prepare_weights` only."""
        for e, layouts in enumerate(self._layouts):
            for which, (layout, parameter) in enumerate(zip(layouts, (self.up, self.down), strict=True)):
                matrix = self._quantized.matrix(e, which)
                if matrix is not None:
                    yield from self._quantized.targets(matrix)
                    continue
                for tensor, target in float_targets(layout, parameter):
                    place = (e, *target.destination)
                    yield tensor, WeightTarget(parameter, target.source_shape, target.source, place)

    def tensor_loaded(self, name: str) -> None:
        """As in FusedMoE."""
        self._quantized.tensor_loaded(name)

    def prepare_weights(self) -> None:
        """Converts the loaded experts to the op provider's form."""
        if self.stays_quantized:
            self.up, self.down = self._quantized.prepare()
            return
        for e, which, matrix in self._quantized.pop():
            floats = (self.up, self.down)[which].data
            floats[e] = matrix.dequantized(floats.shape[-1], floats.dtype, floats.device)
        if self._op.prepare is not None:
            prepared = self._op.prepare((self.up.data, self.down.data))
            del self.up, self.down
            self.up, self.down = prepared
