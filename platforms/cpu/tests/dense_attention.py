"""What attention is: dense, in float64, one query at a time, written from the definition."""

from __future__ import annotations

import torch

from tests.helpers.attention_cases import DTYPES, Case


def attend_densely(case: Case) -> torch.Tensor:
    """[T, num_heads * head_size] in float64, from the values that are really stored."""
    spec = case.spec
    group = spec.num_heads // spec.num_kv_heads
    kv_dtype = DTYPES[spec.kv_dtype]
    rows = []
    token = 0
    for (before, new), key, value in zip(case.requests, case.keys, case.values):
        key = key.to(kv_dtype).double().repeat_interleave(group, dim=1)
        value = value.to(kv_dtype).double().repeat_interleave(group, dim=1)
        for position in range(before, before + new):
            first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
            seen = slice(first, position + 1)
            scores = torch.einsum("hd,thd->ht", case.query[token].double(), key[seen]) * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            if case.sinks is not None:
                scores = torch.cat([scores, case.sinks.double()[:, None]], dim=1)
            weights = scores.softmax(dim=1)[:, : position + 1 - first]
            rows.append(torch.einsum("ht,thd->hd", weights, value[seen]).flatten())
            token += 1
    return torch.stack(rows)
