"""Lookup of rows in a table."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of a table.

    Args:
        ids: [T], int32 or int64, each in [0, num_embeddings).
        weight: [num_embeddings, embedding_dim], compute dtype.

    Returns:
        [T, embedding_dim], compute dtype.
    """
    return F.embedding(ids, weight)


EMBEDDING = OpSchema(
    embedding,
    facts={"num_embeddings": "rows of the table on this rank", "embedding_dim": "columns of the table"},
)
