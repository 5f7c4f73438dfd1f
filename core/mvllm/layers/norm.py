"""RMS norm and layer norm. Every rank holds the whole weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import HeadShard, RowParallelLinear
from mvllm.layers.weight_target import WeightTarget, whole_tensor_target


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.

    Attributes:
        op: The operation `rms_norm`.
    """

    def __init__(self, ctx: BuildContext, name: str, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.weight = ctx.parameter(hidden_size)
        self.op = ctx.op("rms_norm", hidden_size=hidden_size)
        self._norm = self.op.function
        self._add_norm = ctx.op("fused_add_rms_norm", hidden_size=hidden_size).function
        self._sums_over: GroupCoordinator | None = None

    def sum_results_of(self, linear: RowParallelLinear) -> None:
        """Lets `add_norm` add up the ranks' results of `linear`, which its caller passes without another use."""
        self._sums_over = linear.leave_sum_to_caller()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size], normalised."""
        return self._norm(x, self.weight, self.eps)

    def summed_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """The `x` that `add_norm` adds, summed over the ranks if `add_norm` does that; `x` itself stays as it is."""
        return x if self._sums_over is None else self._sums_over.all_reduce(x.clone())

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds `x` to the residual stream (None: the stream is `x`); returns the normalised sum and the sum.

        The storage of `x` and `residual` may be reused.
        """
        if residual is None:
            return self._norm(x, self.weight, self.eps), x
        if self._sums_over is not None:
            fused = self._sums_over.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)
            if fused is not None:
                return fused
            x = self._sums_over.all_reduce(x)
        return self._add_norm(x, residual, self.weight, self.eps)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank."""
        yield whole_tensor_target(f"{self.name}.weight", self.weight)


class GemmaRMSNorm(RMSNorm):
    """An RMSNorm whose checkpoint stores the weight minus one."""

    def prepare_weights(self) -> None:
        """Adds the one once, after loading."""
        self.weight.add_(1.0)


class UnitRMSNorm(RMSNorm):
    """An RMSNorm whose weight is one, and is not in the checkpoint."""

    def __init__(self, ctx: BuildContext, hidden_size: int, eps: float) -> None:
        super().__init__(ctx, "", hidden_size, eps)
        del self.weight
        self.weight: Any = ctx.place(torch.ones(hidden_size, dtype=ctx.dtype, device=ctx.device), None)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """None."""
        return iter(())


class FullWidthQKNorm(nn.Module):
    """RMS norms of queries and keys, each over the heads of all ranks together.

    Args:
        ctx: Build context.
        names: The checkpoint modules of the queries' norm and of the keys'.
        heads: This rank's heads.
        num_heads, num_kv_heads: Heads of the whole model.
        head_size: Elements per head.
        eps: Added to the mean square.
    """

    def __init__(
        self,
        ctx: BuildContext,
        names: tuple[str, str],
        heads: HeadShard,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        eps: float,
    ) -> None:
        super().__init__()
        self.names, self.eps = names, eps
        self.full_sizes = (num_heads * head_size, num_kv_heads * head_size)
        devices = heads.devices or (heads,)
        self._shares = (
            [(device.first_head * head_size, device.num_heads * head_size) for device in devices],
            [(device.first_kv_head * head_size, device.num_kv_heads * head_size) for device in devices],
        )
        self.q_weight = ctx.parameter(heads.num_heads * head_size)
        self.k_weight = ctx.parameter(heads.num_kv_heads * head_size)
        # Number of elements in the sum over ranks, which counts a key/value head once per copy.
        self._counted = [weight.numel() * ctx.tp.world_size for weight in (self.q_weight, self.k_weight)]
        self._tp = ctx.tp
        self._q_norm = ctx.op("rms_norm", hidden_size=self.q_weight.numel()).function
        self._k_norm = ctx.op("rms_norm", hidden_size=self.k_weight.numel()).function

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Query [T, heads, head_size] and key [T, kv_heads, head_size], normalised."""
        q, k = query.flatten(1), key.flatten(1)
        if self._tp.world_size == 1:
            q, k = self._q_norm(q, self.q_weight, self.eps), self._k_norm(k, self.k_weight, self.eps)
            return q.view(query.shape), k.view(key.shape)
        wide = (q.float(), k.float())
        sums = self._tp.all_reduce(torch.cat([x.pow(2).sum(-1, keepdim=True) for x in wide], dim=-1))
        q, k = (
            weight * (x * torch.rsqrt(total / counted + self.eps)).to(query.dtype)
            for weight, x, total, counted in zip(
                (self.q_weight, self.k_weight), wide, sums.split(1, dim=-1), self._counted, strict=True
            )
        )
        return q.view(query.shape), k.view(key.shape)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank."""
        weights = (self.q_weight, self.k_weight)
        for name, weight, full, shares in zip(self.names, weights, self.full_sizes, self._shares, strict=True):
            start = 0
            for first, size in shares:
                source, destination = slice(first, first + size), slice(start, start + size)
                yield f"{name}.weight", WeightTarget(weight, (full,), (source,), (destination,))
                start += size


class LayerNorm(nn.Module):
    """Layer norm over the last dimension.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        hidden_size: Size of the last dimension.
        eps: Added to the variance.
        affine: Whether there are weight and bias.
        bias: Whether the checkpoint has the bias of an affine norm; if not, it is zero.
    """

    def __init__(
        self, ctx: BuildContext, name: str, hidden_size: int, eps: float, *, affine: bool = True, bias: bool = True
    ) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.weight = ctx.parameter(hidden_size) if affine else None
        self.bias: torch.Tensor | None = ctx.parameter(hidden_size) if affine and bias else None
        if affine and not bias:
            # A vector, because the operation has either both weight and bias or none.
            self.bias = ctx.place(torch.zeros(hidden_size, dtype=ctx.dtype, device=ctx.device), None)
        norm = ctx.op("layer_norm", hidden_size=hidden_size, affine=affine)
        fused = ctx.op("fused_add_layer_norm", hidden_size=hidden_size, affine=affine)
        self._norm = norm.function
        self._add_norm = fused.function if fused.may_replace(norm) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size], normalised."""
        return self._norm(x, self.weight, self.bias, self.eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As RMSNorm.add_norm."""
        if residual is not None and self._add_norm is not None:
            return self._add_norm(x, residual, self.weight, self.bias, self.eps)
        total = x if residual is None else residual + x
        return self.forward(total), total

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank."""
        for suffix, parameter in (("weight", self.weight), ("bias", self.bias)):
            if isinstance(parameter, nn.Parameter):
                yield whole_tensor_target(f"{self.name}.{suffix}", parameter)


class BiaslessLayerNorm(LayerNorm):
    """A LayerNorm with a weight and no bias."""

    def __init__(self, ctx: BuildContext, name: str, hidden_size: int, eps: float) -> None:
        super().__init__(ctx, name, hidden_size, eps, bias=False)


Norm = RMSNorm | LayerNorm

NormMaker = Callable[[BuildContext, str, int, float], Norm]
"""Creates a norm from a context, a checkpoint module, a size and an eps."""
