"""Attention in both directions of encoders, without a KV cache.

It needs no attention backend: the operation `encoder_attention` takes the keys and values of the step itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import HeadShard


class PackedAttention(nn.Module):
    """Attention of every token to all tokens of its sequence, for the towers of multimodal models.

    Args:
        ctx: Build context.
        num_heads: Query heads.
        head_size: Elements per head.
        scale: Factor on query-key products.
        num_kv_heads: Key/value heads, which divide the query heads; None for as many.
        cross: The keys have sequences of their own.
    """

    def __init__(
        self,
        ctx: BuildContext,
        num_heads: int,
        head_size: int,
        scale: float,
        *,
        num_kv_heads: int | None = None,
        cross: bool = False,
    ) -> None:
        super().__init__()
        self._scale, self._is_cross = scale, cross
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self._op = ctx.op(
            "encoder_attention", num_heads=num_heads, num_kv_heads=kv_heads, head_size=head_size, cross=cross
        ).function

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: Sequence[int],
        key_starts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Computes attention.

        Args:
            query: [T, num_heads, head_size]; rows may be strided.
            key, value: [T, num_kv_heads, head_size], or [K, ...] with `cross`; rows may be strided.
            starts: Host: the first token of each sequence, and the end of the last one.
            key_starts: The same of the keys, with `cross`; else None.

        Returns:
            [T, num_heads * head_size]; zeros where a token belongs to no sequence.
        """
        assert (key_starts is not None) is self._is_cross, "`key_starts` belongs to cross-attention"
        keys_of = None if key_starts is None else tuple(key_starts)
        found: torch.Tensor = self._op(query, key, value, tuple(starts), self._scale, keys_of)
        return found


class EncoderAttention(nn.Module):
    """Attention within each prompt of a step, over this rank's heads.

    Args:
        ctx: Build context.
        heads: This rank's heads, each with its own key and value.
        head_size: Elements per head.
        scale: Factor on query-key products.
    """

    def __init__(self, ctx: BuildContext, heads: HeadShard, head_size: int, scale: float) -> None:
        super().__init__()
        self._attention = PackedAttention(ctx, heads.num_heads, head_size, scale)
        self._scale = scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """Computes attention.

        Args:
            query, key, value: [T, heads on this rank, head_size].
            step: The step, with `prompt_starts` or `prompt_starts_array`.

        Returns:
            [T, heads on this rank * head_size]; zeros where a token belongs to no prompt.
        """
        if step.prompt_starts_array is not None:
            return self._masked(query, key, value, step.prompt_starts_array)
        assert step.prompt_starts is not None, "an encoder needs `prompt_starts`"
        found: torch.Tensor = self._attention(query, key, value, step.prompt_starts)
        return found

    def _masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """The same for prompts whose lengths are values on the device: all pairs of tokens, with a mask."""
        tokens = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)
        prompt = (tokens.unsqueeze(1) >= starts[1:].unsqueeze(0)).to(torch.int32).sum(-1)
        is_same = prompt.unsqueeze(1) == prompt.unsqueeze(0)
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        scores = torch.bmm(query, key.transpose(1, 2)).float() * self._scale
        weights = torch.softmax(scores.masked_fill(~is_same, -torch.inf), dim=-1).to(value.dtype)
        return torch.bmm(weights, value).transpose(0, 1).flatten(1)
