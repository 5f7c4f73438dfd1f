"""Attention backend with paged attention by the shared Triton kernels.

The kernels read the block table on the device. A step's metadata consists of tables on the device, copied there by
core, and a few numbers on the host. Nothing here waits for the device, so a step can be captured in a graph.

    cache of a layer   keys, values   [num_blocks, block_size, num_kv_heads, head_size or value_size]
                       scales of each [num_blocks, block_size, num_kv_heads] float32, for 8-bit dtypes
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from mvllm.plugin_api import AttentionSpec, BatchLayout, KVLayout, RotarySpec, RotaryWriter
from mvllm_torch_gpu.block_copies import PagedBlocks
from mvllm_torch_gpu.paged_metadata import PagedMetadata
from mvllm_triton.attention import mla_attention, paged_attention
from mvllm_triton.reshape_and_cache import reshape_and_cache, reshape_and_cache_mla
from mvllm_triton.rotary_embedding_and_cache import rotary_embedding_and_cache

BLOCK_SIZES = (16, 32, 64, 128, 256, 8)
MAX_HEAD_SIZE = 512
MAX_LATENT_SIZE = 576
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SCALED_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.uint8}
"""8-bit storage dtypes and the dtypes of their tensors; float8 is stored as codes, which every device can read. The
kernels read them as float8 on a device with such numbers."""

FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e4m3fnuz": torch.float8_e4m3fnuz}
"""Formats of float8 codes: both have three bits of mantissa; scales compensate their different ranges."""

_SCALE_BYTES = 4

Cache = tuple[torch.Tensor, ...]
"""One layer's keys, values unless they are part of the keys, then the scales of each for 8-bit caches."""


class TritonAttention(PagedBlocks):
    """Attention backend over the kernels of mvllm_triton.

    Args:
        spec: The layer.
        float8: Format of the codes in a float8 cache, one of FLOAT8: the format in which the device computes.
    """

    def __init__(self, spec: AttentionSpec, *, float8: str = "float8_e4m3fn") -> None:
        super().__init__(spec)
        self._format: dict[str, Any] = {"float8": FLOAT8[float8]}

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
        largest = MAX_LATENT_SIZE if spec.values_in_keys else MAX_HEAD_SIZE
        if max(spec.head_size, spec.value_size) > largest:
            problems.append(f"heads have at most {largest} elements, not {max(spec.head_size, spec.value_size)}")
        return problems + spec.contradictions()

    def kv_layout(self) -> KVLayout:
        sizes, spec = self._sizes(), self.spec
        per_head = sum(sizes) * self._stored.itemsize + (len(sizes) * _SCALE_BYTES if self._scaled else 0)
        return KVLayout(block_sizes=BLOCK_SIZES, bytes_per_token=spec.num_kv_heads * per_head)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> Cache:
        slots = (num_blocks, block_size, self.spec.num_kv_heads)
        shapes: list[tuple[tuple[int, ...], torch.dtype]]
        shapes = [((*slots, size), self._stored) for size in self._sizes()]
        if self._scaled:
            shapes += [(slots, torch.float32) for _ in self._sizes()]
        try:
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes)
        except RuntimeError as e:
            size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
            raise MemoryError(
                f"The KV cache of one layer needs {size / 2**30:.2f} GiB, which are not free on the device. Lower "
                "--memory-utilization, or set fewer blocks."
            ) from e

    def build_metadata(self, batch: BatchLayout) -> PagedMetadata:
        return PagedMetadata(
            query_start_loc=batch.query_start_loc_device,
            seq_lens=batch.seq_lens_device,
            block_table=batch.block_table_device,
            slot_mapping=batch.slot_mapping_device,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            block_size=batch.block_size,
            kind=batch.kind,
            capture=batch.capture,
            visible_lens=batch.visible_lens_device,
        )

    def write_kv(self, kv: Cache, key: torch.Tensor, value: torch.Tensor, metadata: PagedMetadata) -> None:
        key, slots = _with_plain_rows(key), metadata.slot_mapping
        if self.spec.values_in_keys:
            reshape_and_cache_mla(key, kv[0], slots, kv_scale=kv[1] if self._scaled else None, **self._format)
            return
        scales = kv[2:] if self._scaled else (None, None)
        value = _with_plain_rows(value)
        reshape_and_cache(key, value, kv[0], kv[1], slots, k_scale=scales[0], v_scale=scales[1], **self._format)

    def forward(
        self, query: torch.Tensor, kv: Cache, metadata: PagedMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        spec, query = self.spec, _with_plain_rows(query)
        tables = metadata.block_table, metadata.query_start_loc, metadata.seq_lens
        if spec.values_in_keys and spec.value_size < spec.head_size:
            found = mla_attention(
                query,
                kv[0],
                *tables,
                value_size=spec.value_size,
                scale=spec.scale,
                max_query_len=metadata.max_query_len,
                max_seq_len=metadata.max_seq_len,
                window=spec.sliding_window,
                soft_cap=spec.soft_cap,
                sinks=sinks,
                kv_scale=kv[1] if self._scaled else None,
                visible_lens=metadata.visible_lens,
                **self._format,
            )
        else:
            values = kv[0] if spec.values_in_keys else kv[1]
            key_scale, value_scale = (kv[len(kv) // 2], kv[-1]) if self._scaled else (None, None)
            found = paged_attention(
                query,
                kv[0],
                values,
                *tables,
                scale=spec.scale,
                max_query_len=metadata.max_query_len,
                max_seq_len=metadata.max_seq_len,
                window=spec.sliding_window,
                soft_cap=spec.soft_cap,
                sinks=sinks,
                k_scale=key_scale,
                v_scale=value_scale,
                visible_lens=metadata.visible_lens,
                **self._format,
            )
        return found.flatten(1)

    def rotary_writer(self, rotary: RotarySpec) -> RotaryWriter | None:
        if self.spec.values_in_keys:
            return None  # latents are rotated before they are put together
        return partial(self._rotate_and_write, rotary)

    def _rotate_and_write(
        self,
        rotary: RotarySpec,
        kv: Cache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: PagedMetadata,
        index: torch.Tensor,
        cos_sin: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        scales = kv[2:] if self._scaled else (None, None)
        return rotary_embedding_and_cache(
            _with_plain_rows(query),
            _with_plain_rows(key),
            _with_plain_rows(value),
            index,
            cos_sin,
            kv[0],
            kv[1],
            metadata.slot_mapping,
            interleaved=rotary.interleaved,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=rotary.norm_eps or 0.0,
            k_scale=scales[0],
            v_scale=scales[1],
            **self._format,
        )

    def storage_format(self) -> str:
        is_float8 = self.spec.kv_dtype in FLOAT8
        return str(self._format["float8"]).removeprefix("torch.") if is_float8 else self.spec.kv_dtype

    @property
    def _scaled(self) -> bool:
        return self.spec.kv_dtype in SCALED_DTYPES

    @property
    def _stored(self) -> torch.dtype:
        return (DTYPES | SCALED_DTYPES)[self.spec.kv_dtype]

    def _sizes(self) -> tuple[int, ...]:
        """Head sizes of the stored parts: keys, and values unless they are part of the keys."""
        spec = self.spec
        return (spec.head_size,) if spec.values_in_keys else (spec.head_size, spec.value_size)


def _with_plain_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with contiguous elements in each head; tokens and heads may stay strided."""
    return x if x.stride(-1) == 1 else x.contiguous()
