"""The operation `embedding`: lookup of rows in a table."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema


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
