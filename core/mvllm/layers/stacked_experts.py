"""Staging of GPT-OSS's quantized experts; one checkpoint tensor holds a matrix of all experts.

StackedMXFP4     gate_up_proj_blocks, _scales    [experts, 2 · size, hidden_size / 32, ...]   gate and up alternate
                 down_proj_blocks, _scales       [experts, hidden_size, size / 32, ...]
StackedBlocks    gate_up_proj.packed_weight      [experts, 2 · size, row_bytes], likewise, in blocks
                 down_proj.packed_weight         [experts, hidden_size, row_bytes]
StackedFloats    gate_up_proj, down_proj         floats, rounded to integers
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.quantization.block_quantization import BlockQuantization
from mvllm.layers.quantization.interface import IntegerFormat
from mvllm.layers.quantization.mxfp4 import GROUP_SIZE, MXFP4, as_blocks, dequantize
from mvllm.layers.quantization.online_quantization import OnlineQuantization
from mvllm.layers.quantization.quantized_matrix import (
    ExpertFacts,
    expert_facts,
    integer_facts,
    on_device,
    staging,
)
from mvllm.layers.quantization.rtn_matrix import rounded
from mvllm.layers.quantized_experts import ReadOnce
from mvllm.layers.weight_target import WeightTarget, whole
from mvllm.ops.block_formats import BLOCK_FORMATS
from mvllm.ops.block_quantized_linear import BlockQuantizedPart, BlockQuantizedWeight
from mvllm.ops.quantized_moe import ExpertWeight

Targets = Iterator[tuple[str, WeightTarget]]


@dataclass(frozen=True)
class ExpertStack:
    """Sizes of the experts of one layer.

    Attributes:
        name: The checkpoint module that holds all experts.
        num_experts, hidden_size, intermediate_size: As in GptOssExperts.
        band: The range of inner elements on this rank.
    """

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    band: slice

    @property
    def size(self) -> int:
        """Number of inner elements on this rank."""
        return int(self.band.stop - self.band.start)

    @property
    def halves(self) -> Iterator[tuple[slice, slice]]:
        """Gate and up: the slices of their rows in the checkpoint and on this rank."""
        for first in (0, 1):
            rows = slice(2 * self.band.start + first, 2 * self.band.stop, 2)
            yield rows, slice(first * self.size, (first + 1) * self.size)

    def float_targets(self, gate_up: nn.Parameter, down: nn.Parameter) -> Targets:
        """Targets of the checkpoint's floats in [experts, 2 · size, hidden_size] and [experts, hidden_size, size]."""
        experts, outer, inner = slice(0, self.num_experts), slice(0, self.hidden_size), 2 * self.intermediate_size
        for source, rows in self.halves:
            shape, taken = (self.num_experts, self.hidden_size, inner), (experts, outer, source)
            target = WeightTarget(gate_up, shape, taken, (experts, rows, outer), transpose=True)
            yield f"{self.name}.gate_up_proj", target
        shape, taken = (self.num_experts, self.intermediate_size, self.hidden_size), (experts, self.band, outer)
        target = WeightTarget(down, shape, taken, (experts, outer, slice(0, self.size)), transpose=True)
        yield f"{self.name}.down_proj", target


class QuantizedStack(ABC):
    """The quantized experts of one layer.

    Attributes:
        gate_up_facts, down_facts: As `QuantizedMatrix.expert_facts`, of every expert.
    """

    gate_up_facts: ExpertFacts | None
    down_facts: ExpertFacts | None

    def __init__(self, sizes: ExpertStack) -> None:
        self.sizes = sizes

    @abstractmethod
    def targets(self) -> Targets:
        """Checkpoint tensor names and their targets on this rank."""

    @abstractmethod
    def gate_up(self, expert: int) -> ExpertWeight:
        """[2 · size, hidden_size], gate rows first, on the device."""

    @abstractmethod
    def down(self, expert: int) -> ExpertWeight:
        """[hidden_size, size], on the device."""

    def keep_quantized(self) -> None:
        """Called before `targets` if `gate_up` and `down` will be called."""
        return

    def weights(self) -> tuple[ReadOnce, ReadOnce]:
        """gate_up and down of all experts, created on access."""
        experts = range(self.sizes.num_experts)
        return ReadOnce(partial(self.gate_up, e) for e in experts), ReadOnce(partial(self.down, e) for e in experts)


def quantized_stack(ctx: BuildContext, sizes: ExpertStack) -> QuantizedStack | None:
    """The experts in the format of the model's quantization; None if it does not quantize them."""
    method = ctx.quantization
    if isinstance(method, MXFP4):
        return StackedMXFP4(ctx, sizes)
    if isinstance(method, BlockQuantization):
        formats = method.format_of(f"{sizes.name}.gate_up_proj"), method.format_of(f"{sizes.name}.down_proj")
        columns = sizes.hidden_size, sizes.band.start, sizes.band.stop, sizes.intermediate_size
        if not all(name in BLOCK_FORMATS for name in formats):
            return None
        first, *others = columns
        in_up, in_down = (BLOCK_FORMATS[name].block_values for name in formats)
        fits = first % in_up == 0 and all(end % in_down == 0 for end in others)
        return StackedBlocks(ctx, sizes, method, *formats) if fits else None
    return StackedFloats(ctx, sizes, method.format) if isinstance(method, OnlineQuantization) else None


class StackedMXFP4(QuantizedStack):
    """MXFP4 experts of a checkpoint, staged on the host.

    Args:
        ctx: Build context.
        sizes: Sizes of the experts.
    """

    def __init__(self, ctx: BuildContext, sizes: ExpertStack) -> None:
        super().__init__(sizes)
        self._ctx = ctx
        # Groups of 32 columns: the first and last group of a shard may overlap adjacent shards.
        self._groups = slice(sizes.band.start // GROUP_SIZE, -(-sizes.band.stop // GROUP_SIZE))
        self._stored = {
            suffix: staging(*(s.stop - s.start for s in source), dtype=torch.uint8)
            for suffix, (_, source) in self._tensors().items()
        }
        ends = (sizes.hidden_size, sizes.band.start, sizes.band.stop)
        fits = all(end % GROUP_SIZE == 0 for end in ends)
        self.gate_up_facts = _block_facts(ctx, "mxfp4", "mxfp4") if fits else None
        self.down_facts = _block_facts(ctx, "mxfp4") if fits else None

    def targets(self) -> Targets:
        for suffix, (shape, source) in self._tensors().items():
            parameter = self._stored[suffix]
            yield f"{self.sizes.name}.{suffix}", WeightTarget(parameter, shape, source, whole(parameter))

    def gate_up(self, expert: int) -> BlockQuantizedWeight:
        blocks = as_blocks(*self._packed("gate_up", expert))
        return _block_weight(self._ctx, self.sizes.hidden_size, ("mxfp4", blocks[0::2]), ("mxfp4", blocks[1::2]))

    def down(self, expert: int) -> BlockQuantizedWeight:
        return _block_weight(self._ctx, self.sizes.size, ("mxfp4", as_blocks(*self._packed("down", expert))))

    def dequantized(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up and down of an expert as floats, on the host."""
        rows = dequantize(*self._packed("gate_up", expert))
        start = self.sizes.band.start - self._groups.start * GROUP_SIZE
        columns = dequantize(*self._packed("down", expert))[:, start : start + self.sizes.size]
        return torch.cat((rows[0::2], rows[1::2])), columns

    def _packed(self, which: str, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, scales = self._stored[f"{which}_proj_blocks"], self._stored[f"{which}_proj_scales"]
        return blocks.detach()[expert], scales.detach()[expert]

    def _tensors(self) -> dict[str, tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Shape of each tensor and the slices that this rank reads, by name suffix."""
        sizes = self.sizes
        hidden, inner = -(-sizes.hidden_size // GROUP_SIZE), -(-sizes.intermediate_size // GROUP_SIZE)
        upper = (sizes.num_experts, 2 * sizes.intermediate_size, hidden)
        lower = (sizes.num_experts, sizes.hidden_size, inner)
        experts, pairs = slice(0, sizes.num_experts), slice(2 * sizes.band.start, 2 * sizes.band.stop)
        of_upper = (experts, pairs, slice(0, hidden))
        of_lower = (experts, slice(0, sizes.hidden_size), self._groups)
        bytes_of_group = slice(0, GROUP_SIZE // 2)
        return {
            "gate_up_proj_blocks": ((*upper, bytes_of_group.stop), (*of_upper, bytes_of_group)),
            "gate_up_proj_scales": (upper, of_upper),
            "down_proj_blocks": ((*lower, bytes_of_group.stop), (*of_lower, bytes_of_group)),
            "down_proj_scales": (lower, of_lower),
        }


class StackedBlocks(QuantizedStack):
    """Block-quantized experts of a checkpoint format, staged on the host.

    Args:
        ctx: Build context.
        sizes: Sizes of the experts; this rank's columns are whole blocks.
        method: The checkpoint's quantization.
        of_gate_up, of_down: Block formats of gate_up and down.
    """

    def __init__(
        self, ctx: BuildContext, sizes: ExpertStack, method: BlockQuantization, of_gate_up: str, of_down: str
    ) -> None:
        super().__init__(sizes)
        self._ctx, self._method, self._of_gate_up, self._of_down = ctx, method, of_gate_up, of_down
        self.gate_up_facts = _block_facts(ctx, of_gate_up, of_gate_up)
        self.down_facts = _block_facts(ctx, of_down)
        upper, lower = BLOCK_FORMATS[of_gate_up].row_bytes, BLOCK_FORMATS[of_down].row_bytes
        rows, columns = 2 * sizes.size, upper(sizes.hidden_size)
        self._gate_up = staging(sizes.num_experts, rows, columns, dtype=torch.uint8)
        self._down = staging(sizes.num_experts, sizes.hidden_size, lower(sizes.size), dtype=torch.uint8)

    def targets(self) -> Targets:
        sizes, lower = self.sizes, BLOCK_FORMATS[self._of_down].row_bytes
        experts, columns, outer = (slice(0, n) for n in (*self._gate_up.shape[::2], sizes.hidden_size))
        shape = sizes.num_experts, 2 * sizes.intermediate_size, columns.stop
        for source, rows in sizes.halves:
            target = WeightTarget(self._gate_up, shape, (experts, source, columns), (experts, rows, columns))
            yield f"{sizes.name}.gate_up_proj.packed_weight", target
        band = slice(lower(sizes.band.start), lower(sizes.band.stop))
        shape = sizes.num_experts, sizes.hidden_size, lower(sizes.intermediate_size)
        filled = (experts, outer, slice(0, self._down.shape[2]))
        target = WeightTarget(self._down, shape, (experts, outer, band), filled)
        yield f"{sizes.name}.down_proj.packed_weight", target

    def keep_quantized(self) -> None:
        for matrix in ("gate_up_proj", "down_proj"):
            self._method.take_stack(f"{self.sizes.name}.{matrix}")

    def gate_up(self, expert: int) -> BlockQuantizedWeight:
        halves = self._gate_up.detach()[expert].chunk(2)
        return _block_weight(self._ctx, self.sizes.hidden_size, *((self._of_gate_up, half) for half in halves))

    def down(self, expert: int) -> BlockQuantizedWeight:
        return _block_weight(self._ctx, self.sizes.size, (self._of_down, self._down.detach()[expert]))


class StackedFloats(QuantizedStack):
    """Experts of an unquantized checkpoint, staged on the host and rounded when they are accessed.

    Args:
        ctx: Build context.
        sizes: Sizes of the experts.
        format: The integer format to which they are rounded.
    """

    def __init__(self, ctx: BuildContext, sizes: ExpertStack, format: IntegerFormat) -> None:
        super().__init__(sizes)
        self._format, self._device = format, ctx.device
        self.gate_up_facts = integer_facts(sizes.hidden_size, format)
        self.down_facts = integer_facts(sizes.size, format)
        self._gate_up = staging(sizes.num_experts, 2 * sizes.size, sizes.hidden_size, dtype=ctx.dtype)
        self._down = staging(sizes.num_experts, sizes.hidden_size, sizes.size, dtype=ctx.dtype)

    def targets(self) -> Targets:
        yield from self.sizes.float_targets(self._gate_up, self._down)

    def gate_up(self, expert: int) -> ExpertWeight:
        return on_device(rounded(self._gate_up.detach()[expert], self._format), self._device)

    def down(self, expert: int) -> ExpertWeight:
        return on_device(rounded(self._down.detach()[expert], self._format), self._device)


def _block_facts(ctx: BuildContext, *formats: str) -> ExpertFacts:
    facts = {"formats": formats, "int8_activations": ctx.dtype != torch.float32}
    return expert_facts("block_quantized_linear", facts)


def _block_weight(ctx: BuildContext, in_features: int, *parts: tuple[str, torch.Tensor]) -> BlockQuantizedWeight:
    """A block-quantized weight of these rows, on the device."""
    made = tuple(BlockQuantizedPart(name, blocks.to(ctx.device).contiguous()) for name, blocks in parts)
    return BlockQuantizedWeight(made, in_features, ctx.dtype != torch.float32, ctx.dtype)
