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
    for r, (before, new) in enumerate(case.requests):
        key, value = (
            whole[r].to(kv_dtype).double().repeat_interleave(group, dim=1) for whole in (case.keys, case.values)
        )
        query = case.query[len(rows) : len(rows) + new].double()
        scores = torch.einsum("nhd,thd->nht", query, key) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        for i in range(new):
            position = before + i
            first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
            seen = scores[i, :, first : position + 1]
            if case.sinks is not None:
                seen = torch.cat([seen, case.sinks.double()[:, None]], dim=1)
            weights = seen.softmax(dim=1)[:, : position + 1 - first]
            rows.append((weights[:, None] @ value[first : position + 1].transpose(0, 1)).flatten())
    return torch.stack(rows)
