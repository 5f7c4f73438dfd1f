"""Paged attention with the compiled kernels: per layer and step, one call stores keys and values and one attends.

The kernels read the block table themselves; nothing is gathered or padded. `csrc/kernels.h` describes the layout of
a layer's cache, which only the kernels read.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mvllm.plugin_api import AttentionBackend, AttentionSpec, BatchLayout, KVLayout
from mvllm_cpu import cache_views, kernels, workspace
from mvllm_cpu.memory import HUGE_PAGE, zeros
from mvllm_cpu.recording import Kernel
from mvllm_cpu.thread_team import thread_use_log

BLOCK_SIZES = (16, 32, 64, 128, 256)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCALED_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.uint8}
"""8-bit storage dtypes and the torch dtypes that hold them; each key and value of a token and head has a scale."""
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KV_DTYPE_CODES = {name: code for code, name in enumerate((*DTYPES, *SCALED_DTYPES))}
SCALE_BYTES = 4

PREFAULTED_BYTES = 1 << 30
PREFAULTED_TOKENS = 1 << 14
"""Limits of the KV cache memory that is prefaulted: bytes per worker, and tokens in each part. A cache may be as large
as half of the memory, which an idle server should not use.
"""

FRONT_TOKENS = 256
"""Tokens at the front of each part of a KV cache that are in small pages. A first short prompt writes to every part of
every layer; in huge pages, that alone allocates and zeroes 120 MB for a model of 30 layers.
"""


class KernelSpec(ctypes.Structure):
    """`Spec` of csrc/kernels.h."""

    _fields_ = [
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("value_size", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("latent", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("batch_invariant", ctypes.c_int32),
        ("index_topk", ctypes.c_int32),
        ("indexer", ctypes.c_int32),
    ]


class _Batch(ctypes.Structure):
    """`Batch` of csrc/kernels.h."""

    _fields_ = [
        ("num_requests", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("block_table_stride", ctypes.c_int32),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("visible_lens", ctypes.c_void_p),
    ]


class _Cache(ctypes.Structure):
    """`Cache` of csrc/kernels.h."""

    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
    ]


class PagedCache(tuple[torch.Tensor, ...]):
    """One layer's keys, values and scales in the layout of csrc/kernels.h, as far as its spec needs them.

    Attributes:
        address: Address of a `Cache` (csrc/kernels.h) that points to them.
    """

    address: int
    _pointers: _Cache
    _cancel_prefault: Callable[[int], None] | None = None

    def prefault_in_background(self, library: ctypes.CDLL, block_size: int) -> None:
        """Prefaults the memory while no kernel runs, because the first write may be slow (csrc/page_prefault.cpp)."""
        self._cancel_prefault = library.mvllm_cpu_prefault_cancel
        for part in self:
            if part.nbytes >= HUGE_PAGE:  # smaller parts are allocated already
                front = part[: PREFAULTED_TOKENS // block_size]
                library.mvllm_cpu_prefault(part.data_ptr(), front.nbytes, PREFAULTED_BYTES)

    def __del__(self) -> None:
        if self._cancel_prefault is not None:
            for part in self:
                self._cancel_prefault(part.data_ptr())

    @classmethod
    def of(cls, stored: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> PagedCache:
        """A cache of keys and values, or keys only, with or without scales."""
        cache = cls((*stored, *scales))
        fields = zip(("keys", "values"), stored), zip(("key_scales", "value_scales"), scales)
        cache._pointers = _Cache(**{name: part.data_ptr() for pairs in fields for name, part in pairs})
        cache.address = ctypes.addressof(cache._pointers)
        return cache


class BatchArrays(NamedTuple):
    """The host arrays of a step that the kernels read: int32, contiguous; as in BatchLayout."""

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    visible_lens: np.ndarray | None = None

    @classmethod
    def of(cls, batch: BatchLayout) -> BatchArrays:
        """The arrays of a layout."""
        given = (batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping)
        starts, seq_lens, table, slots = (np.ascontiguousarray(array, dtype=np.int32) for array in given)
        seen = batch.visible_lens
        visible = None if seen is None else np.ascontiguousarray(seen, dtype=np.int32)
        return cls(starts, seq_lens, table, slots, visible)


class PagedMetadata:
    """A step's division of work, owned by the library, and the arrays that it reads.

    Args:
        library: The kernels.
        spec: The attention layer.
        arrays: The step.
        block_size: Tokens per block.

    Attributes:
        handle: Address of the library's step object.
        num_tokens: Tokens of real requests; later rows are padding.
    """

    def __init__(self, library: ctypes.CDLL, spec: KernelSpec, arrays: BatchArrays, block_size: int) -> None:
        self._arrays = arrays
        starts, seq_lens, block_table, slot_mapping, visible_lens = arrays
        plain = _Batch(
            num_requests=len(seq_lens),
            num_tokens=len(slot_mapping),
            block_size=block_size,
            block_table_stride=block_table.shape[1] if block_table.ndim == 2 else 0,
            query_start_loc=starts.ctypes.data,
            seq_lens=seq_lens.ctypes.data,
            block_table=block_table.ctypes.data,
            slot_mapping=slot_mapping.ctypes.data,
            visible_lens=None if visible_lens is None else visible_lens.ctypes.data,
        )
        self.num_tokens = int(starts[len(seq_lens)])
        self._free = library.mvllm_cpu_step_free
        self.handle: int = library.mvllm_cpu_step_new(ctypes.byref(spec), ctypes.byref(plain))

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._free(self.handle)


def declare(library: ctypes.CDLL) -> None:
    """Declares the argument types of the attention functions."""
    pointer = ctypes.c_void_p
    library.mvllm_cpu_step_new.argtypes = [ctypes.POINTER(KernelSpec), ctypes.POINTER(_Batch)]
    library.mvllm_cpu_step_new.restype = pointer
    library.mvllm_cpu_step_free.argtypes = [pointer]
    library.mvllm_cpu_step_free.restype = None
    library.mvllm_cpu_prefault.argtypes = [pointer, ctypes.c_int64, ctypes.c_int64]
    library.mvllm_cpu_prefault.restype = None
    library.mvllm_cpu_prefault_cancel.argtypes = [pointer]
    library.mvllm_cpu_prefault_cancel.restype = None
    atexit.unregister(library.mvllm_cpu_prefault_stop)
    atexit.register(library.mvllm_cpu_prefault_stop)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class PagedAttention(AttentionBackend):
    """Paged attention through the compiled kernels. Needs `kernels.load().library`."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        library = kernels.load().library
        assert library is not None, "the platform offers this backend only with the kernels loaded"
        declare(library)
        self._library: Any = library
        pointer, length = ctypes.c_void_p, ctypes.c_int64
        stores = (pointer, pointer, length, pointer, length, pointer)
        self._write_kv = Kernel(library, "mvllm_cpu_reshape_and_cache", stores)
        attends = (pointer, pointer, length, pointer, pointer, ctypes.c_int, pointer)
        self._attention = Kernel(library, "mvllm_cpu_paged_attention", attends)
        self._dtype = DTYPES[spec.dtype]
        self._scaled = spec.kv_dtype in SCALED_DTYPES
        self._kv_dtype = (DTYPES | SCALED_DTYPES)[spec.kv_dtype]
        self._spec = KernelSpec(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            value_size=0 if spec.indexer else spec.value_size,
            dtype=KV_DTYPE_CODES[spec.dtype],
            kv_dtype=KV_DTYPE_CODES[spec.kv_dtype],
            window=spec.sliding_window or 0,
            latent=spec.values_in_keys,
            scale=spec.scale,
            soft_cap=spec.soft_cap or 0.0,
            batch_invariant=spec.batch_invariant,
            index_topk=spec.index_topk or 0,
            indexer=spec.indexer,
        )
        self._sizes: tuple[int, ...] = (_round_up(spec.head_size, 4),)
        if not spec.values_in_keys:
            self._sizes += (_round_up(spec.value_size, 16),)

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        problems = [
            f"{what} {name} is not supported (supported: {', '.join(supported)})"
            for what, name, supported in (
                ("compute dtype", spec.dtype, DTYPES),
                ("KV cache dtype", spec.kv_dtype, DTYPES | SCALED_DTYPES),
            )
            if name not in supported
        ]
        return problems + spec.contradictions()

    def kv_layout(self) -> KVLayout:
        per_head = sum(self._sizes) * self._kv_dtype.itemsize + self._scaled * len(self._sizes) * SCALE_BYTES
        return KVLayout(block_sizes=BLOCK_SIZES, bytes_per_token=self.spec.num_kv_heads * per_head)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> PagedCache:
        assert block_size in BLOCK_SIZES, f"block size {block_size} is not among those of kv_layout(): {BLOCK_SIZES}"
        heads = (num_blocks, self.spec.num_kv_heads)
        token_bytes = [self.spec.num_kv_heads * size * self._kv_dtype.itemsize for size in self._sizes]
        stored = [
            zeros((*heads, size, block_size), self._kv_dtype, small_front=FRONT_TOKENS * of_token)
            for size, of_token in zip(self._sizes, token_bytes, strict=True)
        ]
        scales = [zeros((*heads, block_size), torch.float32) for _ in self._sizes if self._scaled]
        cache = PagedCache.of(stored, scales)
        cache.prefault_in_background(self._library, block_size)
        return cache

    def build_metadata(self, batch: BatchLayout) -> PagedMetadata:
        thread_use_log().step()
        return PagedMetadata(self._library, self._spec, BatchArrays.of(batch), batch.block_size)

    def write_kv(self, kv: PagedCache, key: torch.Tensor, value: torch.Tensor, metadata: PagedMetadata) -> None:
        key, value = self._rows(key), self._rows(value)
        self._write_kv(
            metadata.handle,
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            kv.address,
        )

    def forward(
        self, query: torch.Tensor, kv: PagedCache, metadata: PagedMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        query = self._rows(query)
        out = workspace.empty((query.shape[0], self.spec.num_heads * self.spec.value_size), self._dtype)
        if metadata.num_tokens < query.shape[0]:
            out[metadata.num_tokens :].zero_()
        if sinks is not None:
            sinks = sinks.contiguous()
        self._attention(
            metadata.handle,
            query.data_ptr(),
            query.stride(0),
            kv.address,
            None if sinks is None else sinks.data_ptr(),
            0 if sinks is None else DTYPE_CODES[sinks.dtype],
            out.data_ptr(),
        )
        return out

    def fill(self, kv: PagedCache, value: float) -> None:
        keys, values, scales = self._parts(kv)
        cache_views.fill(cache_views.key_views(keys, self.spec.head_size), value)
        cache_views.fill([cache_views.value_view(part, self.spec.value_size) for part in values], value)
        cache_views.fill(scales, value)

    def read_slots(self, kv: PagedCache, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        keys, values, scales = self._parts(kv)
        blocks, tokens = slots // keys.shape[3], slots % keys.shape[3]
        return [
            cache_views.read_key(keys, self.spec.head_size, blocks, tokens),
            *(cache_views.read_value(part, self.spec.value_size, blocks, tokens) for part in values),
            *(cache_views.read_scales(part, blocks, tokens) for part in scales),
        ]

    def _parts(self, kv: PagedCache) -> tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Keys, values if they are stored, and scales if there are any."""
        stored = len(self._sizes)
        return kv[0], kv[1:stored], kv[stored:]

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """`x` in the format of the kernels: contiguous heads and the compute dtype; rows may be strided."""
        if x.dtype != self._dtype:
            x = x.to(self._dtype)
        if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            x = x.contiguous()
        return x
