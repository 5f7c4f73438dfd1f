"""Products with a weight matrix, and lookups of its rows.

| operation | result |
|---|---|
| `linear` | x · weightᵀ + bias |
| `linear_silu_and_mul` | the same, fused with the SwiGLU activation |
| `head_product` | each head's rows times a matrix of its own |
| `embedding` | rows of a table |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.activation import silu_and_mul
from mvllm.ops.schema import OpSchema


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias.

    Args:
        x: [..., in_features], compute dtype.
        weight: [out_features, in_features], compute dtype, or the result of the provider's `prepare`.
        bias: [out_features] or None, compute dtype.

    Returns:
        [..., out_features], compute dtype.
    """
    return F.linear(x, weight, bias)


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """SwiGLU projection: silu of the first half of x · weightᵀ + bias, times the second half.

    Layers call it instead of `linear` and `silu_and_mul` if a provider other than this reference implements it.

    Args:
        x: [..., in_features], compute dtype.
        weight: [2 · size, in_features], compute dtype, gate rows first, or the result of the provider's `prepare`.
        bias: [2 · size] or None, compute dtype.

    Returns:
        [..., size], compute dtype. The product may be rounded to the compute dtype before the activation.
    """
    return silu_and_mul(linear(x, weight, bias))


LINEAR_SILU_AND_MUL = OpSchema(
    linear_silu_and_mul,
    facts={
        "in_features": "columns of the weight on this rank",
        "size": "half of the weight's rows on this rank",
        "bias": "whether a bias is added",
    },
    replaces_others=True,
)

LINEAR = OpSchema(
    linear,
    facts={
        "in_features": "columns of the weight on this rank",
        "out_features": "rows of the weight on this rank",
        "bias": "whether a bias is added",
    },
)


def head_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rows of each head times the head's matrix.

    Args:
        x: [T, num_heads, in_size], compute dtype; leading dimensions may be strided, the last is contiguous.
        weight: [num_heads, in_size, out_size], compute dtype; one of the last two dimensions is contiguous.

    Returns:
        [T, num_heads, out_size], compute dtype, maybe strided; sums in float32.
    """
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


HEAD_PRODUCT = OpSchema(
    head_product,
    facts={
        "num_heads": "heads on this rank",
        "in_size": "elements of a head before the product",
        "out_size": "elements of a head after it",
    },
)


def embedding(ids: torch.Tensor, weight: torch.Tensor, first: int | None = None) -> torch.Tensor:
    """Rows of a table.

    Args:
        ids: [T], int32 or int64, each in [0, num_embeddings), unless `first` is given.
        weight: [num_embeddings, embedding_dim], compute dtype.
        first: The id of the table's first row. Rows of ids outside of the table are then zeros.

    Returns:
        [T, embedding_dim], compute dtype.
    """
    if first is None:
        return F.embedding(ids, weight)
    local = ids - first
    here = (local >= 0) & (local < weight.shape[0])
    return F.embedding(local.where(here, 0), weight).masked_fill_(~here.unsqueeze(-1), 0)


EMBEDDING = OpSchema(
    embedding,
    facts={"num_embeddings": "rows of the table on this rank", "embedding_dim": "columns of the table"},
    is_exact=True,
)
