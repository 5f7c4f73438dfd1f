"""GptOssExperts: experts with biases and clamped gates, stacked in one checkpoint tensor.

    gate_up_proj  [experts, hidden_size, 2 · size]    columns of gate and up alternate      (floats)
    down_proj     [experts, size, hidden_size]
    gate_up_proj_blocks, _scales    [experts, 2 · size, hidden_size / 32, ...]              (MXFP4, transposed)
    down_proj_blocks, _scales       [experts, hidden_size, size / 32, ...]

Tensor parallelism shards every expert along its inner size, as in `fused_moe.py`. Only the first rank adds the biases
of results that are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mvllm.errors import ConfigError
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import shard_slice
from mvllm.layers.norm import whole_tensor_target
from mvllm.layers.quantization.mxfp4 import GROUP_SIZE, MXFP4, dequantize
from mvllm.layers.quantization.quantized_matrix import staging
from mvllm.layers.weight_target import WeightTarget


class GptOssExperts(nn.Module):
    """The experts of one layer.

    Args:
        ctx: Build context.
        name: The checkpoint module that holds all experts.
        hidden_size, intermediate_size: Outer and inner size of one expert.
        num_experts, top_k: Experts in all, and per token.
        alpha, limit: As in the operation `clamped_moe`.

    Attributes:
        gate_up, down: As in FusedMoE.
        gate_up_bias: [num_experts, 2 · size], gate first.
        down_bias: [num_experts, hidden_size]; zero on all ranks but the first.

    Raises:
        ConfigError: The checkpoint is quantized by another method than MXFP4.
    """

    gate_up: Any
    down: Any

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        alpha: float,
        limit: float,
    ) -> None:
        super().__init__()
        method = ctx.quantization
        if method is not None and not method.quantizes_on_load and not isinstance(method, MXFP4):
            raise ConfigError(
                f"{name}: quantization {type(method).__name__} is not supported for the experts of this family, only "
                "floats and MXFP4. Use the model's original checkpoint."
            )
        self.name, self.hidden_size, self.intermediate_size = name, hidden_size, intermediate_size
        self.num_experts, self.alpha, self.limit = num_experts, alpha, limit
        self.band = shard_slice(intermediate_size, ctx.shares, f"inner elements of {name}")
        size = self.band.stop - self.band.start
        names = ("gate_up", "gate_up_bias", "down", "down_bias")
        self.partitions: Mapping[str, int] = {} if num_experts % ctx.num_devices else dict.fromkeys(names, 0)
        self._place = ctx.place
        self.gate_up_bias = ctx.parameter(num_experts, 2 * size)
        self.down_bias = ctx.parameter(num_experts, hidden_size)
        gate_up, down = ctx.parameter(num_experts, 2 * size, hidden_size), ctx.parameter(num_experts, hidden_size, size)
        self.packed = None
        if isinstance(method, MXFP4):
            # Groups of 32 columns: the first and last group of a shard may overlap the neighbouring shards.
            self._groups = slice(self.band.start // GROUP_SIZE, -(-self.band.stop // GROUP_SIZE))
            self.packed = nn.ParameterDict(
                {
                    suffix: staging(*(s.stop - s.start for s in source), dtype=torch.uint8)
                    for suffix, (_, source) in self._packed_tensors().items()
                }
            )
            self.gate_up, self.down = gate_up.data, down.data  # not parameters: no checkpoint tensor fills them
        else:
            self.gate_up, self.down = gate_up, down
        self._adds_bias = ctx.tp.is_first
        self._op = ctx.op(
            "clamped_moe", num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, intermediate_size=size
        )
        self._moe = self._op.function

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As in FusedMoE."""
        up, down = (self.gate_up, self.gate_up_bias), (self.down, self.down_bias)
        return self._moe(x, *up, *down, ids, weights, self.alpha, self.limit)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank. Before `prepare_weights` only."""
        experts, outer, inner = slice(0, self.num_experts), slice(0, self.hidden_size), 2 * self.intermediate_size
        size = self.band.stop - self.band.start
        yield whole_tensor_target(f"{self.name}.down_proj_bias", self.down_bias)
        for first, rows in ((0, slice(0, size)), (1, slice(size, 2 * size))):
            every_second = slice(2 * self.band.start + first, 2 * self.band.stop, 2)
            yield (
                f"{self.name}.gate_up_proj_bias",
                WeightTarget(self.gate_up_bias, (self.num_experts, inner), (experts, every_second), (experts, rows)),
            )
            if self.packed is None:
                yield (
                    f"{self.name}.gate_up_proj",
                    WeightTarget(
                        self.gate_up,
                        (self.num_experts, self.hidden_size, inner),
                        (experts, outer, every_second),
                        (experts, rows, outer),
                        transpose=True,
                    ),
                )
        if self.packed is None:
            shape = (self.num_experts, self.intermediate_size, self.hidden_size)
            source, destination = (experts, self.band, outer), (experts, outer, slice(0, size))
            yield f"{self.name}.down_proj", WeightTarget(self.down, shape, source, destination, transpose=True)
            return
        for suffix, (full, part) in self._packed_tensors().items():
            parameter = self.packed[suffix]
            everything = tuple(slice(0, size) for size in parameter.shape)
            yield f"{self.name}.{suffix}", WeightTarget(parameter, full, part, everything)

    def prepare_weights(self) -> None:
        """Dequantizes the experts and converts them to the op provider's form."""
        if not self._adds_bias:
            self.down_bias.data.zero_()
        if self.packed is not None:
            packed = {suffix: parameter.data for suffix, parameter in self.packed.items()}
            start = self.band.start - self._groups.start * GROUP_SIZE
            size = self.band.stop - self.band.start
            for e in range(self.num_experts):
                rows = dequantize(packed["gate_up_proj_blocks"][e], packed["gate_up_proj_scales"][e])
                self.gate_up[e, :size], self.gate_up[e, size:] = rows[0::2], rows[1::2]
                columns = dequantize(packed["down_proj_blocks"][e], packed["down_proj_scales"][e])
                self.down[e] = columns[:, start : start + size]
            self.packed = None
            for name in ("gate_up", "down"):
                setattr(self, name, self._place(getattr(self, name), self.partitions.get(name)))
        if self._op.prepare is not None:
            prepared = self._op.prepare((self.gate_up.data, self.down.data))
            del self.gate_up, self.down
            self.gate_up, self.down = prepared

    def _packed_tensors(self) -> dict[str, tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Shape of each tensor of packed experts and the slices that this rank reads, by name suffix."""
        hidden, inner = -(-self.hidden_size // GROUP_SIZE), -(-self.intermediate_size // GROUP_SIZE)
        upper, lower = (
            (self.num_experts, 2 * self.intermediate_size, hidden),
            (self.num_experts, self.hidden_size, inner),
        )
        experts, pairs = slice(0, self.num_experts), slice(2 * self.band.start, 2 * self.band.stop)
        of_upper = (experts, pairs, slice(0, hidden))
        of_lower = (experts, slice(0, self.hidden_size), self._groups)
        bytes_of_group = slice(0, GROUP_SIZE // 2)
        return {
            "gate_up_proj_blocks": ((*upper, bytes_of_group.stop), (*of_upper, bytes_of_group)),
            "gate_up_proj_scales": (upper, of_upper),
            "down_proj_blocks": ((*lower, bytes_of_group.stop), (*of_lower, bytes_of_group)),
            "down_proj_scales": (lower, of_lower),
        }
