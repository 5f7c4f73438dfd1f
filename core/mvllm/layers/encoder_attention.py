"""Bidirectional attention of encoders within each prompt, without a KV cache.

Without a cache it needs no platform backend, only the first token of each prompt in the step. Adjacent prompts of equal
length are computed together.

    tokens   a a a a b b b b c c        two prompts of 4, one of 2
             [2, heads, 4, size]  [1, heads, 2, size]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from mvllm.layers.context import ForwardStep
from mvllm.layers.linear import HeadShard


class EncoderAttention(nn.Module):
    """Attention within each prompt, over this rank's heads.

    Args:
        heads: This rank's heads, each with its own key and value.
        head_size: Elements per head.
        scale: Factor on query-key products.
    """

    def __init__(self, heads: HeadShard, head_size: int, scale: float) -> None:
        super().__init__()
        self._num_heads = heads.num_heads
        self._head_size = head_size
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
        output = query.new_zeros(query.shape[0], self._num_heads * self._head_size)
        for start, stop, count in _equal_runs(step.prompt_starts):
            shape = (count, (stop - start) // count, self._num_heads, self._head_size)
            parts = [tensor[start:stop].reshape(shape).transpose(1, 2) for tensor in (query, key, value)]
            found = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], scale=self._scale)
            output[start:stop] = found.transpose(1, 2).reshape(stop - start, -1)
        return output

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


def _equal_runs(starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First token, end and number of prompts of each run of prompts of equal length, without empty prompts."""
    begin, count = starts[0], 0
    for i in range(1, len(starts)):
        count += 1
        length = starts[i] - starts[i - 1]
        if i + 1 == len(starts) or starts[i + 1] - starts[i] != length:
            if length:
                yield begin, starts[i], count
            begin, count = starts[i], 0
