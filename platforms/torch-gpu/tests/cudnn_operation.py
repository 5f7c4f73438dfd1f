"""Torch's operation of cuDNN attention on the host: exact results, and the rules of the real one.

`on_the_host` registers a CPU kernel of `aten::_scaled_dot_product_cudnn_attention`, which torch implements for CUDA
only. Its rules are those of torch's source (aten/src/ATen/native/cudnn/MHA.cpp, and sdp_utils.cpp of
native/transformers/cuda) and of the cuDNN frontend that torch builds its graphs with:

    dtypes       float16 and bfloat16, one for all tensors
    head sizes   multiples of 8; up to 128 on every device
    heads        the number of query heads is a multiple of the number of key/value heads
    strides      1 in the last dimension; elsewhere multiples of 16 bytes, as is the address: the graph says so to cuDNN
    lengths      not 1: torch refuses one query on some devices, whose results were wrong, and one key on all
    mask         causal from the upper left corner: row i sees columns up to i, whatever the number of columns
    output       dense, with its dimensions in the query's order of strides
    logsumexp    natural logarithms, float32 [batch, heads, rows, 1]; contiguous, or with
                 TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 a transposed tensor [batch, rows, heads, 1]
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

NAME = "_scaled_dot_product_cudnn_attention"
_ALIGNMENT = 16  # bytes
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Call:
    """A call of the operation: its sizes, and whether its rows were read where the caller had them."""

    rows: int
    columns: int
    causal: bool
    query_strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int, bool]:
        return self.rows, self.columns, self.causal


@contextmanager
def on_the_host() -> Iterator[list[Call]]:
    """Makes the operation work with tensors of the host; gives the list of its calls."""
    calls: list[Call] = []

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: torch.Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[object, ...]:
        assert attn_bias is None and dropout_p == 0.0 and not return_debug_mask and scale is not None
        check(query, key, value)
        calls.append(Call(query.shape[2], key.shape[2], is_causal, query.stride()[1:]))
        found, sums = exact(query, key, value, scale=scale, is_causal=is_causal)
        out = torch.empty_like(query)  # keeps the order of strides
        out.copy_(found)
        if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1":
            sums = sums.transpose(1, 2).contiguous().transpose(1, 2)
        seed = torch.zeros((), dtype=torch.long)
        nothing = torch.empty(0)
        lengths = query.shape[2], key.shape[2]
        return out, sums if compute_log_sumexp else nothing, nothing, nothing, *lengths, seed, seed.clone(), nothing

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(NAME, attention, "CPU")
        yield calls
    finally:
        library._destroy()


def check(*tensors: torch.Tensor) -> None:
    """Fails if the operation does not support the query, the keys and the values."""
    query, key, value = tensors
    assert {x.dtype for x in tensors} in ({torch.float16}, {torch.bfloat16}), [x.dtype for x in tensors]
    assert all(x.dim() == 4 for x in tensors)
    assert query.shape[0] == key.shape[0] and key.shape[:3] == value.shape[:3] and query.shape[3] == key.shape[3]
    assert all(x.shape[3] % 8 == 0 and x.shape[3] <= 128 for x in tensors), [x.shape for x in tensors]
    assert query.shape[1] % key.shape[1] == 0
    assert all(x.shape[2] > 1 for x in tensors)
    for x in tensors:
        assert x.stride(-1) == 1 and x.data_ptr() % _ALIGNMENT == 0, (x.stride(), x.data_ptr())
        steps = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
        assert all(step * x.itemsize % _ALIGNMENT == 0 for step in steps), x.stride()


def exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results in the query's dtype and the logarithms of sums, [batch, heads, rows, 1] float32."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
    found, sums = [], []
    column = torch.arange(key.shape[2])
    for first in range(0, query.shape[2], _ROWS_AT_ONCE):
        rows = query[:, :, first : first + _ROWS_AT_ONCE]
        scores = rows.float() @ key.transpose(2, 3) * scale
        if is_causal:
            row = torch.arange(first, first + rows.shape[2])[:, None]
            scores = scores.masked_fill(column > row, -torch.inf)
        found.append((scores.softmax(-1) @ value).to(query.dtype))
        sums.append(scores.logsumexp(-1, keepdim=True))
    return torch.cat(found, 2), torch.cat(sums, 2)
