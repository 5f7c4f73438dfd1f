"""Attention cases of the conformance suite for the CPU, and dense float64 attention as the oracle."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from mvllm.attention import kv_quantization
from mvllm.ops.dtypes import torch_dtype
from mvllm.plugin_api import AttentionBackend, AttentionSpec, WorkerContext
from mvllm.testing import attention_cases
from mvllm.testing.attention_cases import Case
from mvllm_cpu.runtime import CPURuntime

runtime = functools.cache(lambda: CPURuntime(WorkerContext()))


def make_case(
    spec: AttentionSpec, requests: Sequence[tuple[int, int]], *, block_size: int = 16, spread: float = 1.0
) -> Case:
    """An attention case with a default block size of 16."""
    return attention_cases.make_case(spec, requests, block_size=block_size, spread=spread)


def run(backend: AttentionBackend, case: Case, *, poison: bool = True) -> torch.Tensor:
    """The result of the step; all slots of the cache contain NaN before, unless `poison` is false."""
    return attention_cases.run(backend, runtime(), case, poison=torch.nan if poison else None)


def as_stored(x: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """Keys or values after rounding to the cache dtype, in float64."""
    if kv_dtype in kv_quantization.LARGEST:
        return kv_quantization.decode(*kv_quantization.encode(x, kv_dtype), kv_dtype).double()
    return x.to(torch_dtype(kv_dtype)).double()


def attend_densely(case: Case) -> torch.Tensor:
    """[T, num_heads * value_size] in float64, from keys and values rounded to the cache dtype."""
    spec = case.spec
    group = spec.num_heads // spec.num_kv_heads
    rows = []
    for r, (before, new) in enumerate(case.requests):
        key = as_stored(case.keys[r], spec.kv_dtype).repeat_interleave(group, dim=1)
        if spec.values_in_keys:
            value = key[..., : spec.value_size]
        else:
            value = as_stored(case.values[r], spec.kv_dtype).repeat_interleave(group, dim=1)
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
