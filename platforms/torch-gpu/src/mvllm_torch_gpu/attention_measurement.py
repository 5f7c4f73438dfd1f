"""Steps that stand for a kind of step when attention implementations are timed, and the clock.

The step at hand says little: the steps of the warm-up have sequences of one token. So an implementation is timed on a
step of realistic length over the layer's real cache, with the sizes that the kind of step has in graphs.

    decode   as many requests as the step, each with REALISTIC_TOKENS tokens of context; the table of a graph
    other    as many tokens per request and in all, rounded down to powers of two, at the end of such sequences
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mvllm.plugin_api import BatchLayout
from mvllm_torch_gpu.paged_metadata import PagedMetadata

REALISTIC_TOKENS = 2048
"""Length of the sequences of a timed step, unless the queries or the cache demand another one."""

_ROUNDS = 5
_MILLISECONDS = 10

Clock = Callable[[Callable[[], Any]], float | None]
"""Seconds that a call takes on the device; None if it cannot be timed."""


@dataclass(frozen=True)
class StepKind:
    """Steps for which one implementation is chosen.

    Attributes:
        is_decode: One token per request, padding included.
        num_requests, query_len: Requests, and tokens of each.
        block_size: Tokens per block.
    """

    is_decode: bool
    num_requests: int
    query_len: int
    block_size: int

    @classmethod
    def of(cls, step: PagedMetadata) -> StepKind:
        """The kind of a step."""
        if step.is_decode(step.num_tokens):
            return cls(True, step.num_tokens, 1, step.block_size)
        query_len = _power_of_two(max(1, step.max_query_len))
        requests = max(1, _power_of_two(step.num_tokens) // query_len)
        return cls(False, requests, query_len, step.block_size)

    def __str__(self) -> str:
        return f"{self.num_requests} x {self.query_len} tokens{' (decode)' if self.is_decode else ''}"


def realistic_step(kind: StepKind, num_blocks: int, table_tokens: int, device: torch.device) -> BatchLayout:
    """A step of a kind, whose sequences use all blocks of the cache in turn. Its arrays are new.

    Args:
        kind: The kind.
        num_blocks: Blocks of the cache; their contents do not matter.
        table_tokens: Tokens that a row of a captured step's block table holds.
        device: The cache's device.
    """
    size, rows = kind.block_size, kind.num_requests
    length = min(max(REALISTIC_TOKENS, kind.query_len), num_blocks * size)
    query_len = min(kind.query_len, length)
    pages = -(-length // size)
    table = (np.arange(rows * pages, dtype=np.int32) % num_blocks).reshape(rows, pages)
    starts = np.arange(rows + 1, dtype=np.int32) * np.int32(query_len)
    lens = np.full(rows, length, np.int32)
    slots = np.full(rows * query_len, -1, np.int32)
    width = max(pages, table_tokens // size) if kind.is_decode else pages
    table_there = torch.zeros((rows, width), dtype=torch.int32, device=device)
    table_there[:, :pages] = torch.from_numpy(table).to(device)
    return BatchLayout(
        num_requests=rows,
        num_tokens=rows * query_len,
        max_query_len=query_len,
        max_seq_len=width * size if kind.is_decode else length,
        block_size=size,
        query_start_loc=starts,
        seq_lens=lens,
        block_table=table,
        slot_mapping=slots,
        query_start_loc_device=torch.from_numpy(starts).to(device),
        seq_lens_device=torch.from_numpy(lens).to(device),
        block_table_device=table_there,
        slot_mapping_device=torch.from_numpy(slots).to(device),
    )


def device_seconds(device: torch.device, call: Callable[[], Any], *, replayed: bool) -> float | None:
    """Shortest time of a call, after warm-up runs. Waits for the device.

    Args:
        device: Where it runs.
        call: Submits work to the device, without waiting.
        replayed: The work is part of captured steps: time it without the host's part, where graphs are torch's.
    """
    if device.type == "cpu":
        return _best_on_the_host(call)
    from triton import testing

    if replayed and device.type == "cuda":
        return float(testing.do_bench_cudagraph(call, rep=_MILLISECONDS, return_mode="min")) / 1e3
    return float(testing.do_bench(call, warmup=1, rep=_MILLISECONDS, return_mode="min")) / 1e3


def _best_on_the_host(call: Callable[[], Any]) -> float:
    call()
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def _power_of_two(number: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (max(1, number).bit_length() - 1)
