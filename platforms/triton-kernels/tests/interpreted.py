"""The kernels on Triton's interpreter, as an attention backend of the contract. Skips without Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util

import pytest
import torch

from mvllm.attention import kv_quantization
from mvllm.ops.dtypes import torch_dtype
from mvllm.plugin_api import AttentionBackend, AttentionSpec, BatchLayout, KVLayout, WorkerContext
from mvllm_cpu.runtime import CPURuntime

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed, so its kernels cannot be interpreted", allow_module_level=True)
importlib.import_module("platforms.triton-kernels.tests.interpreter")

import mvllm_triton.attention  # noqa: E402  once Triton is imported with its interpreter
import mvllm_triton.reshape_and_cache  # noqa: E402

runtime = functools.cache(lambda: CPURuntime(WorkerContext()))

PLAIN_TOKENS = 12
"""In steps with more tokens than this torch stores them: the interpreter takes milliseconds for each token."""

_STORED = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


class TritonAttention(AttentionBackend):
    """An AttentionBackend over the kernels, like a platform's.

    Args:
        spec: The layer.
        splits: Like that of `paged_attention`.
        codes: Whether float8 is stored as codes in uint8.
    """

    def __init__(self, spec: AttentionSpec, splits: int | None = None, codes: bool = False) -> None:
        super().__init__(spec)
        self.splits, self.codes = splits, codes

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        return spec.contradictions()

    def kv_layout(self) -> KVLayout:
        raise AssertionError("no test asks")

    def allocate(self, num_blocks, block_size, device):
        spec = self.spec
        stored = _STORED.get(spec.kv_dtype) or torch_dtype(spec.kv_dtype)
        if self.codes and spec.kv_dtype.startswith("float8"):
            stored = torch.uint8
        slots = (num_blocks, block_size, spec.num_kv_heads)
        sizes = (spec.head_size,) if spec.values_in_keys else (spec.head_size, spec.value_size)
        caches = [_garbage((*slots, size), stored) for size in sizes]
        scales = [_garbage(slots, torch.float32) if spec.kv_dtype in _STORED else None for _ in sizes]
        return (*caches, *scales)

    def build_metadata(self, batch: BatchLayout) -> BatchLayout:
        return batch

    def write_kv(self, kv, key, value, metadata):
        slots = metadata.slot_mapping_device
        if len(slots) > PLAIN_TOKENS:
            self._store_with_torch(kv, [key] if self.spec.values_in_keys else [key, value], slots)
            return
        if self.spec.values_in_keys:
            mvllm_triton.reshape_and_cache.reshape_and_cache_mla(key, kv[0], slots, kv_scale=kv[1])
        else:
            mvllm_triton.reshape_and_cache.reshape_and_cache(
                key, value, kv[0], kv[1], slots, k_scale=kv[2], v_scale=kv[3]
            )

    def _store_with_torch(self, kv, new_entries, slots):
        kept = slots >= 0
        for cache, scales, new in zip(kv, kv[len(new_entries) :], new_entries):
            codes = new[kept].to(cache.dtype) if scales is None else None
            if codes is None:
                codes, found = kv_quantization.encode(new[kept], self.spec.kv_dtype)
                scales.flatten(0, 1)[slots[kept].long()] = found
            stored = torch.uint8 if cache.dtype == torch.float8_e4m3fn else cache.dtype
            cache.view(stored).flatten(0, 1)[slots[kept].long()] = codes.view(stored)

    def forward(self, query, kv, metadata, sinks=None):
        spec, step = self.spec, metadata
        tables = step.block_table_device, step.query_start_loc_device, step.seq_lens_device
        options = {
            "scale": spec.scale,
            "max_query_len": step.max_query_len,
            "max_seq_len": step.max_seq_len,
            "window": spec.sliding_window,
            "soft_cap": spec.soft_cap,
            "sinks": sinks,
            "splits": self.splits,
            "visible_lens": step.visible_lens_device,
            "out": torch.full((*query.shape[:2], spec.value_size), torch.nan, dtype=query.dtype),
        }
        if spec.values_in_keys:
            found = mvllm_triton.attention.mla_attention(
                query, kv[0], *tables, value_size=spec.value_size, kv_scale=kv[1], **options
            )
        else:
            found = mvllm_triton.attention.paged_attention(
                query, kv[0], kv[1], *tables, k_scale=kv[2], v_scale=kv[3], **options
            )
        return found.flatten(1)

    def copy_blocks(self, kv, source, destination):
        for part in kv:
            part[destination] = part[source]


def _garbage(shape, dtype):
    """Undefined content of a fresh cache: NaN if the dtype has it."""
    if dtype.itemsize == 1:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, torch.nan, dtype=dtype)
