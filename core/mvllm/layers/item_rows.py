"""Puts rows of items (images, audio, embeddings) into arrays that have a row for each token of a step.

A step has either the tokens that take a row, in the order of the rows, or for each token the row that it takes. The
second form has the same shapes whatever the tokens take: it is for static shapes and for models that run as graphs:

    tokens           a  P  P  b  P  c
    item_indices     1  2  4                 with rows 0, 1, 2 of item_embeds
    item_index      -1  0  1 -1  2 -1
"""

from __future__ import annotations

import torch

from mvllm.layers.context import ForwardStep


def replace_rows(x: torch.Tensor, rows: torch.Tensor, step: ForwardStep) -> torch.Tensor:
    """x [T, size] with `rows` [n, size] in the places of the tokens that take them; in the dtype of x."""
    rows = rows.to(x.dtype)
    if step.item_index is not None:
        return torch.where(_takes_row(step.item_index), _row_of_each_token(rows, step.item_index), x)
    assert step.item_indices is not None, "embeddings of items have places"
    return x.index_copy(0, step.item_indices, rows)


def add_rows(x: torch.Tensor, rows: torch.Tensor, step: ForwardStep) -> torch.Tensor:
    """As `replace_rows`; rows are added to those of x."""
    rows = rows.to(x.dtype)
    if step.item_index is not None:
        return torch.where(_takes_row(step.item_index), x + _row_of_each_token(rows, step.item_index), x)
    assert step.item_indices is not None, "embeddings of items have places"
    return x.index_add(0, step.item_indices, rows)


def replace_ids(ids: torch.Tensor, replacement: int, step: ForwardStep) -> torch.Tensor:
    """Token ids [T] with `replacement` at the tokens that take a row."""
    if step.item_index is not None:
        return torch.where(step.item_index >= 0, replacement, ids)
    return ids if step.item_indices is None else ids.index_fill(0, step.item_indices, replacement)


def _takes_row(item_index: torch.Tensor) -> torch.Tensor:
    """bool [T, 1]: whether each token takes a row."""
    return (item_index >= 0).unsqueeze(1)


def _row_of_each_token(rows: torch.Tensor, item_index: torch.Tensor) -> torch.Tensor:
    """[T, size]: the row of each token, any row for tokens that take none."""
    return rows.index_select(0, item_index.clamp(min=0))
