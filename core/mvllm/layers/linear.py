"""Linear layers with tensor parallelism.

Every linear layer is one matrix [out, in] on this rank, with a list of *parts*: the rows and columns of checkpoint
tensors that it consists of. The parallel variants differ only in their parts:

    column parallel   each rank holds some of the rows     → results are parts of the output
    row parallel      each rank holds some of the columns  → results are summed over ranks
    merged column     rows of several matrices, stacked    → one product instead of several
    QKV               likewise, sharded by heads; a key/value head is replicated if there are more ranks than heads

A quantized matrix has the same parts; its quantization method reads and multiplies them.

A worker with several devices holds the matrices of as many single-device workers side by side: sharded evenly along
`MatrixLayout.partition`, each device gets the matrix of a worker of its own.

    QKV, two devices    rows   q₀ k₀ v₀ | q₁ k₁ v₁
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import ConfigError
from mvllm.layers.context import BuildContext, ShardIndex
from mvllm.layers.matrix_layout import MatrixLayout, Part
from mvllm.layers.quantization.quantized_matrix import Product, QuantizedMatrix
from mvllm.layers.quantization.rtn_matrix import float_targets
from mvllm.layers.weight_target import WeightTarget
from mvllm.ops.registry import ResolvedOp


class Linear(nn.Module):
    """A matrix on this rank, multiplied by the operation `linear` or by that of its quantization method.

    Args:
        ctx: Build context.
        parts: The parts of the rows.
        in_features: Columns of the whole checkpoint matrices.
        bias: Whether there is a bias.
        columns: The columns that this rank holds; None for all.
        transposed: The checkpoint stores matrices as [in, out].
        partition: As in MatrixLayout.

    Attributes:
        weight: [out_features, columns], after loading the result of the op provider's `prepare`. For a quantized layer
            a QuantizedMatrix, and after loading the weight argument of its linear op.
        bias: [out_features] or None.
        quantized: Whether the matrix is quantized.
        supports_lora: Whether LoRA is supported; not if a layer uses the matrix in another way.
        keeps_rows: Whether `prepare_weights` keeps the order of the rows.
        partitions: The dimension along which the devices of this worker shard each parameter; others are replicated.
    """

    weight: Any
    bias: nn.Parameter | None
    supports_lora: bool = True
    keeps_rows: bool = True

    def __init__(
        self,
        ctx: BuildContext,
        parts: Sequence[Part],
        in_features: int,
        *,
        bias: bool,
        columns: slice | None = None,
        transposed: bool = False,
        partition: int | None = None,
    ) -> None:
        super().__init__()
        columns = columns or slice(0, in_features)
        out_features = max(part.destination.stop for part in parts)
        self.layout = MatrixLayout(
            tuple(parts), in_features, columns, out_features, bias, transposed, partition=partition
        )
        self.partitions: Mapping[str, int] = {} if partition is None else {"weight": partition}
        if partition == 0:
            self.partitions = {"weight": 0, "bias": 0}
        self._num_devices = ctx.num_devices
        self.out_features = out_features
        self.bias = ctx.parameter(out_features) if bias else None
        matrix = ctx.quantized(self.layout)
        self.quantized = matrix is not None
        self.weight = ctx.parameter(out_features, self.layout.num_columns) if matrix is None else matrix
        self._op: ResolvedOp | None = None
        if matrix is None:
            self._op = ctx.op("linear", in_features=self.layout.num_columns, out_features=out_features, bias=bias)
        self._linear: Product = unloaded_linear_op if self._op is None else self._op.function
        self._around: Callable[[Product], Product] | None = None
        self._row_order: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in on this rank] to [..., out on this rank]."""
        return self._linear(x, self.weight, self.bias)

    def fuse_silu_and_mul(self, ctx: BuildContext) -> bool:
        """Fuses the product and the following gated activation into one operation, if an op provider has it.

        Called once, while the model is built, with the same context.

        Returns:
            Whether `forward` now includes the activation and returns [..., out_features / 2].
        """
        if ctx.with_adapters or ctx.num_devices > 1:
            return False  # LoRA adds before the activation; with several devices each applies it to its own columns
        size = self.out_features // 2
        activation = ctx.op("silu_and_mul", size=size)
        if isinstance(self.weight, QuantizedMatrix):
            return self.weight.fuse_silu_and_mul(ctx, activation)
        assert self._op is not None, "a matrix of floats has an operation"
        fused = ctx.op(
            "linear_silu_and_mul", in_features=self.layout.num_columns, size=size, bias=self.bias is not None
        )
        if not fused.may_replace(self._op, activation):
            return False
        self._op, self._linear = fused, fused.function
        return True

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank. Before `prepare_weights` only."""
        if isinstance(self.weight, QuantizedMatrix):
            yield from self.weight.targets()
        else:
            yield from float_targets(self.layout, self.weight)
        if self.bias is not None:
            for part in self.layout.parts:
                yield (
                    f"{part.name}.bias",
                    WeightTarget(self.bias, (part.num_rows,), (part.source,), (part.destination,)),
                )

    def can_reorder_rows(self, ctx: BuildContext, order: torch.Tensor) -> bool:
        """Whether `reorder_rows` is supported for this order; not with LoRA, or with several devices."""
        if ctx.with_adapters or ctx.num_devices > 1:
            return False
        return not isinstance(self.weight, QuantizedMatrix) or self.weight.can_reorder_rows(order)

    def reorder_rows(self, order: torch.Tensor) -> None:
        """Changes the order of the rows, after loading. Called once, while the model is built.

        Args:
            order: [out_features], host: for each row of the result, its index in the layout; `can_reorder_rows`
                accepts it.
        """
        self._row_order, self.keeps_rows = order, False
        if isinstance(self.weight, QuantizedMatrix):
            self.weight.reorder_rows(order)

    def prepare_weights(self) -> None:
        """Reorders rows, and prepares the loaded weight for the linear op."""
        if self._row_order is not None:
            for parameter in (self.weight, self.bias):
                if isinstance(parameter, nn.Parameter):  # a quantized matrix does it itself
                    parameter.copy_(parameter[self._row_order.to(parameter.device)])
        self._linear, prepared = resolve_linear_op(self.weight, self._op)
        del self.weight
        self.weight = prepared

    def wrap_linear_op(self, around: Callable[[Product], Product]) -> None:
        """Replaces the linear op by `around(op)`. After `prepare_weights`."""
        self._around = around
        self._linear = around(self._linear)

    def replace_linear_op(self, product: Product) -> None:
        """Replaces the linear op of a loaded layer, inside the wrapper of `wrap_linear_op`."""
        self._linear = product if self._around is None else self._around(product)


class ColumnParallelLinear(Linear):
    """Each rank computes a shard of the outputs.

    `bands` lists the checkpoint matrices, stacked in this order, with their numbers of rows. A repeated name is one
    checkpoint matrix that contains these row ranges in order. With several devices per worker, each device has its
    shard of every band, in the same order.
    """

    def __init__(
        self,
        ctx: BuildContext,
        bands: Sequence[tuple[str, int]],
        in_features: int,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> None:
        parts, start = [], 0
        for device in ctx.shares:
            offsets = dict.fromkeys([name for name, _ in bands], 0)
            for name, num_rows in bands:
                band = shard_slice(num_rows, [device], f"output features of {name}")
                stop, offset = start + band.stop - band.start, offsets[name]
                whole = sum(rows for other, rows in bands if other == name)
                parts.append(Part(name, whole, slice(offset + band.start, offset + band.stop), slice(start, stop)))
                start, offsets[name] = stop, offset + num_rows
        super().__init__(ctx, parts, in_features, bias=bias, transposed=transposed, partition=0)


class RowParallelLinear(Linear):
    """Each rank holds some of the columns; results are summed over ranks, and the first rank adds the bias.

    After `leave_sum_to_caller` the result is this rank's part of the sum.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> None:
        columns = shard_slice(in_features, ctx.shares, f"input features of {name}")
        rows = slice(0, out_features)
        part = Part(name, out_features, rows, rows)
        super().__init__(ctx, [part], in_features, bias=bias, columns=columns, transposed=transposed, partition=1)
        self._tp = ctx.tp
        self._adds_bias = ctx.tp.is_first
        self._sums = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in on this rank] to [..., out], the same on every rank."""
        part = self._linear(x, self.weight, self.bias if self._adds_bias else None)
        return self._tp.all_reduce(part) if self._sums else part

    def leave_sum_to_caller(self) -> GroupCoordinator:
        """From now on the caller adds up the results over the ranks of the returned group."""
        self._sums = False
        return self._tp


def leave_sums_to_caller(module: nn.Module) -> None:
    """From now on the module's result is this rank's part of a sum over ranks.

    Args:
        module: Its result depends linearly on the one of its only RowParallelLinear.
    """
    [last] = [each for each in module.modules() if isinstance(each, RowParallelLinear)]
    last.leave_sum_to_caller()


class ReplicatedLinear(Linear):
    """Every rank holds the whole matrix."""

    def __init__(self, ctx: BuildContext, name: str, in_features: int, out_features: int, *, bias: bool) -> None:
        rows = slice(0, out_features)
        super().__init__(ctx, [Part(name, out_features, rows, rows)], in_features, bias=bias)


@dataclass(frozen=True)
class HeadShard:
    """Attention heads of one rank.

    Attributes:
        num_heads, num_kv_heads: Heads on this rank, including copies.
        first_head, first_kv_head: Index of the first one among all heads.
        devices: The heads of each device of this worker, if it has several.
    """

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int
    devices: tuple[HeadShard, ...] = ()

    @classmethod
    def for_shards(cls, num_heads: int, num_kv_heads: int, shares: Sequence[ShardIndex]) -> HeadShard:
        """The heads of this rank. With fewer key/value heads than shards, adjacent shards hold copies of one.

            8 heads, 2 key/value heads, 4 shards:  shard      0     1     2     3
                                                   heads     0 1   2 3   4 5   6 7
                                                   kv head    0     0     1     1

        Raises:
            ConfigError: The heads do not divide evenly.
        """
        devices = []
        for each in shares:
            heads = shard_slice(num_heads, [each], "attention heads")
            if num_kv_heads >= each.count:
                kv = shard_slice(num_kv_heads, [each], "key/value heads")
            elif each.count % num_kv_heads == 0:
                first = each.index * num_kv_heads // each.count
                kv = slice(first, first + 1)
            else:
                raise ConfigError(
                    f"tensor_parallel_size={each.count} is not a multiple of the model's {num_kv_heads} "
                    "key/value heads."
                )
            devices.append(cls(heads.stop - heads.start, kv.stop - kv.start, heads.start, kv.start))
        if len(devices) == 1:
            return devices[0]
        counts = (sum(d.num_heads for d in devices), sum(d.num_kv_heads for d in devices))
        return cls(*counts, devices[0].first_head, devices[0].first_kv_head, tuple(devices))


class QKVLinear(Linear):
    """Query, key and value projections in one product, sharded by heads.

    Args:
        ctx: Build context.
        names: Checkpoint modules of query, key and value; or one module that holds all three, stacked in this order.
        by_group: The single module stores for each key/value head its query heads, then its key, then its value.
        hidden_size: Input features.
        num_heads, num_kv_heads: Heads of the whole model.
        head_size: Elements per head.
        bias: Whether there are biases.
        transposed: The checkpoint stores matrices as [in, out].
        gated: The module of the queries stores for each head its query, then a gate for the head's result. Needs three
            modules, and a worker with one device.

    Attributes:
        heads: This rank's heads.
        sizes: Output features of query, key and value on one device of this worker, and of the gates if there are any.
    """

    def __init__(
        self,
        ctx: BuildContext,
        names: tuple[str, str, str] | tuple[str],
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        bias: bool,
        transposed: bool = False,
        by_group: bool = False,
        gated: bool = False,
    ) -> None:
        self_heads = HeadShard.for_shards(num_heads, num_kv_heads, ctx.shares)
        devices = self_heads.devices or (self_heads,)
        q_size, kv_size = devices[0].num_heads * head_size, devices[0].num_kv_heads * head_size
        if gated and len(devices) > 1:
            raise ConfigError(
                f"{names[0]} has gates, which are supported on workers with one device only, not with {len(devices)}. "
                "Start a worker for each device."
            )
        parts = []
        for i, device in enumerate(devices):
            if by_group:
                device_parts = _grouped_qkv_parts(names[0], device, num_heads, num_kv_heads, head_size)
            elif gated:
                device_parts = _gated_qkv_parts(names, device, num_heads, num_kv_heads, head_size)
            else:
                device_parts = _stacked_qkv_parts(names, device, num_heads, num_kv_heads, head_size)
            start = i * (q_size + 2 * kv_size)
            for part in device_parts:
                rows = slice(start + part.destination.start, start + part.destination.stop)
                parts.append(replace(part, destination=rows))
        super().__init__(ctx, parts, hidden_size, bias=bias, transposed=transposed, partition=0)
        self.heads = self_heads
        self.sizes: tuple[int, ...] = (q_size, kv_size, kv_size, *([q_size] if gated else []))
        self._head_size = head_size

    def reorder_heads(self, ctx: BuildContext, order: torch.Tensor) -> bool:
        """Changes the order of the elements of each query and key head, by reordering rows after loading.

        Called once, while the model is built, with the same context.

        Args:
            order: [head_size], host: for each element of the result, its index in the checkpoint's head.

        Returns:
            Whether it is done; not for most quantized matrices, with LoRA, or with several devices.
        """
        heads = self.heads.num_heads + self.heads.num_kv_heads
        firsts = torch.arange(heads).unsqueeze(1) * self._head_size
        values = torch.arange(heads * self._head_size, self.out_features)
        rows = torch.cat(((firsts + order).flatten(), values))
        if not self.can_reorder_rows(ctx, rows):
            return False
        self.reorder_rows(rows)
        return True

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The product for `x` [T, hidden_size] as query [T, heads, head_size], and key and value [T, kv_heads, ...]."""
        y = self.forward(x)
        shape = (x.shape[0], -1, self._head_size)
        if self._num_devices > 1:
            q, k, v = y.unflatten(-1, (self._num_devices, -1)).split(self.sizes, dim=-1)
            return q.reshape(shape), k.reshape(shape), v.reshape(shape)
        q, k, v = y.split(self.sizes, dim=-1)
        return q.view(shape), k.view(shape), v.view(shape)

    def split_gated(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `split`, for a layer with gates: also the gates before their activation [T, heads * head_size]."""
        q, k, v, gate = self.forward(x).split(self.sizes, dim=-1)
        shape = (x.shape[0], -1, self._head_size)
        return q.view(shape), k.view(shape), v.view(shape), gate


def _stacked_qkv_parts(
    names: tuple[str, ...], device: HeadShard, num_heads: int, num_kv_heads: int, head_size: int
) -> list[Part]:
    """Parts of a device's queries, keys and values in three matrices, or in one that stacks them in this order."""
    sizes = [count * head_size for count in (device.num_heads, device.num_kv_heads, device.num_kv_heads)]
    firsts = (device.first_head, device.first_kv_head, device.first_kv_head)
    full = [count * head_size for count in (num_heads, num_kv_heads, num_kv_heads)]
    parts, destination, offset = [], 0, 0
    for i, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
        name, num_rows = (names[i], full[i]) if len(names) == 3 else (names[0], sum(full))
        start = first * head_size + (offset if len(names) == 1 else 0)
        parts.append(Part(name, num_rows, slice(start, start + size), slice(destination, destination + size)))
        destination += size
        offset += full[i]
    return parts


def _grouped_qkv_parts(name: str, share: HeadShard, num_heads: int, num_kv_heads: int, head_size: int) -> list[Part]:
    """Parts of a device's queries, keys and values in a matrix that stores them group by group.

    6 heads, 2 key/value heads:   q0 q1 q2 k0 v0 q3 q4 q5 k1 v1
    """
    in_group = num_heads // num_kv_heads
    num_rows = (num_heads + 2 * num_kv_heads) * head_size

    def part(group: int, place: int, count: int, destination: int) -> Part:
        start = (group * (in_group + 2) + place) * head_size
        stop = start + count * head_size
        at = destination * head_size
        return Part(name, num_rows, slice(start, stop), slice(at, at + stop - start))

    last_head = share.first_head + share.num_heads
    queries, keys, values = [], [], []
    for n in range(share.num_kv_heads):
        group = share.first_kv_head + n
        first, last = max(share.first_head, group * in_group), min(last_head, (group + 1) * in_group)
        queries.append(part(group, first - group * in_group, last - first, first - share.first_head))
        keys.append(part(group, in_group, 1, share.num_heads + n))
        values.append(part(group, in_group + 1, 1, share.num_heads + share.num_kv_heads + n))
    return [*queries, *keys, *values]


def _gated_qkv_parts(
    names: tuple[str, ...], device: HeadShard, num_heads: int, num_kv_heads: int, head_size: int
) -> list[Part]:
    """Parts of a device's queries, keys, values and gates, in this order.

    Module of the queries, 2 heads:   q0 gate0 q1 gate1
    """
    parts = _stacked_qkv_parts(names, device, num_heads, num_kv_heads, head_size)[1:]
    start_of_gates = parts[-1].destination.stop
    for i in range(device.num_heads):
        for place, start in ((0, 0), (1, start_of_gates)):
            source, destination = (2 * (device.first_head + i) + place) * head_size, start + i * head_size
            rows = slice(source, source + head_size), slice(destination, destination + head_size)
            parts.append(Part(names[0], 2 * num_heads * head_size, *rows))
    return sorted(parts, key=lambda part: part.destination.start)


def unloaded_linear_op(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """The linear op of a quantized layer before loading: raises an error."""
    raise AssertionError("call prepare_weights first")


def resolve_linear_op(weight: Any, op: ResolvedOp | None) -> tuple[Product, Any]:
    """The linear op and its weight argument, after loading.

    Args:
        weight: A parameter, or a QuantizedMatrix.
        op: The operation for a parameter.
    """
    if isinstance(weight, QuantizedMatrix):
        return weight.finish()
    assert op is not None, "a matrix of floats has an operation"
    return op.function, weight if op.prepare is None else op.prepare(weight.data)


def shard_slice(size: int, shares: Sequence[ShardIndex], what: str) -> slice:
    """The range of `size` elements that belongs to adjacent shards.

    Raises:
        ConfigError: `size` is not a multiple of the number of shards.
    """
    first, last = shares[0], shares[-1]
    if size % first.count:
        raise ConfigError(
            f"{size} {what} cannot be shared evenly by {first.count} ranks. Choose a "
            "tensor_parallel_size that divides them."
        )
    band = size // first.count
    return slice(band * first.index, band * (last.index + 1))
