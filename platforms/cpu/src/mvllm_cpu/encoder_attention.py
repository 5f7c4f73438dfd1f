"""The operation `encoder_attention` with the kernels of paged attention.

The sequences of a call are requests of one step. Their keys and values are stored in blocks that last for the call, in
the layout that the kernels read, and each query sees all keys of its sequence:

    cu_seqlens     (0, 20, 50)            sequences of 20 and 30 tokens
    block_table    [0, 1], [2, 3]         blocks of 16
    visible_lens   20 (20 times), 30 (30 times)
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from mvllm.plugin_api import OpCase, OpProvider
from mvllm_cpu import recording, workspace
from mvllm_cpu.ops import PROVIDER, supports
from mvllm_cpu.paged_attention import (
    DTYPE_CODES,
    BatchArrays,
    KernelSpec,
    PagedCache,
    PagedMetadata,
    declare,
)
from mvllm_cpu.recording import Kernel

BLOCK_SIZE = 16
VALUE_ALIGNMENT = 16
LAYOUTS = 8
"""Layouts that are kept: the layers of an encoder alternate between a few, such as all patches and windows of them."""


@dataclass(frozen=True, eq=False)
class _Layout:
    """The requests of a call.

    Attributes:
        arrays: The arrays that the kernels read.
        num_blocks: Blocks of all keys.
        covers_all: Every query belongs to a sequence.
    """

    arrays: BatchArrays
    num_blocks: int
    covers_all: bool


@lru_cache(LAYOUTS)
def _layout(num_tokens: int, num_keys: int, cu_seqlens: tuple[int, ...], cu_seqlens_k: tuple[int, ...]) -> _Layout:
    starts, keys_of = (np.array(each, dtype=np.int32) for each in (cu_seqlens, cu_seqlens_k))
    lens, num_queries = np.diff(keys_of), np.diff(starts)
    pages = -(-lens // BLOCK_SIZE)
    first_page = pages.cumsum() - pages
    width = max(1, int(pages.max(initial=0)))
    table = (first_page[:, None] + np.arange(width)).astype(np.int32)  # entries past a request's last are not read
    slots = np.full(num_keys, -1, dtype=np.int32)
    offsets = np.arange(int(lens.sum())) - (lens.cumsum() - lens).repeat(lens)
    slots[keys_of[0] : keys_of[-1]] = (first_page * BLOCK_SIZE).repeat(lens) + offsets
    visible = np.zeros(num_tokens, dtype=np.int32)
    visible[starts[0] : starts[-1]] = lens.repeat(num_queries)
    arrays = BatchArrays(starts, lens.astype(np.int32), table, slots, visible)
    return _Layout(arrays, int(pages.sum()), cu_seqlens[0] == 0 and cu_seqlens[-1] == num_tokens)


class EncoderAttention:
    """The operation, bound to the opened library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library)
        self._library = library
        self._steps: OrderedDict[tuple[Any, ...], PagedMetadata] = OrderedDict()
        pointer, length = ctypes.c_void_p, ctypes.c_int64
        self._write_kv = Kernel(
            library, "mvllm_cpu_reshape_and_cache", (pointer, pointer, length, pointer, length, pointer)
        )
        attends = (pointer, pointer, length, pointer, pointer, ctypes.c_int, pointer)
        self._attention = Kernel(library, "mvllm_cpu_paged_attention", attends)

    def providers(self) -> Sequence[OpProvider]:
        """One, and one for `batch_invariant`."""
        return [
            OpProvider("encoder_attention", PROVIDER, self.encoder_attention, _supports),
            OpProvider(
                "encoder_attention",
                f"{PROVIDER}_batch_invariant",
                partial(self.encoder_attention, batch_invariant=True),
                _only_batch_invariant,
                batch_invariant=True,
            ),
        ]

    def encoder_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: Sequence[int],
        scale: float,
        cu_seqlens_k: Sequence[int] | None = None,
        *,
        batch_invariant: bool = False,
    ) -> torch.Tensor:
        """Attention of every token to all tokens of its own sequence."""
        query, key, value = _rows(query), _rows(key), _rows(value)
        (num_tokens, num_heads, size), num_kv_heads = query.shape, key.shape[1]
        starts = tuple(cu_seqlens)
        layout = _layout(num_tokens, key.shape[0], starts, starts if cu_seqlens_k is None else tuple(cu_seqlens_k))
        out = workspace.empty((num_tokens, num_heads * size), query.dtype)
        if not layout.covers_all:
            out[: starts[0]].zero_()
            out[starts[-1] :].zero_()
        if starts[0] == starts[-1]:
            return out
        # Undefined contents: no dimension of a key is padding, and those of values do not affect other dimensions.
        padded = -(-size // VALUE_ALIGNMENT) * VALUE_ALIGNMENT
        shapes = [(layout.num_blocks, num_kv_heads, each, BLOCK_SIZE) for each in (size, padded)]
        cache = PagedCache.of([workspace.empty(shape, query.dtype) for shape in shapes], [])
        step = self._step(layout, (num_heads, num_kv_heads, size, DTYPE_CODES[query.dtype], scale, batch_invariant))
        recording.hold(step, cache)  # a replay writes the same memory
        self._write_kv(step.handle, key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0), cache.address)
        self._attention(step.handle, query.data_ptr(), query.stride(0), cache.address, None, 0, out.data_ptr())
        return out

    def _step(self, layout: _Layout, settings: tuple[int, int, int, int, float, bool]) -> PagedMetadata:
        """The metadata of a call, which is that of the layer before it.

        Args:
            settings: Query heads, key/value heads, elements per head, code of the dtype, scale, batch invariance.
        """
        key = (layout, torch.get_num_threads(), *settings)
        found = self._steps.pop(key, None)
        if found is None:
            num_heads, num_kv_heads, size, dtype, scale, batch_invariant = settings
            spec = KernelSpec(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=size,
                value_size=size,
                dtype=dtype,
                kv_dtype=dtype,
                scale=scale,
                batch_invariant=batch_invariant,
            )
            found = PagedMetadata(self._library, spec, layout.arrays, BLOCK_SIZE)
        self._steps[key] = found
        if len(self._steps) > LAYOUTS:
            self._steps.popitem(last=False)
        return found


def _supports(case: OpCase) -> list[str]:
    reasons = supports(case)
    if case.facts["head_size"] % 4:
        reasons.append(f"heads have a multiple of 4 elements, not {case.facts['head_size']}")
    return reasons


def _only_batch_invariant(case: OpCase) -> list[str]:
    return _supports(case) if case.batch_invariant else ["it is used with batch_invariant only"]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with contiguous heads; rows may be strided."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
