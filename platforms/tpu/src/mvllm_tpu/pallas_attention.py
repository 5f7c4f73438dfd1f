"""Paged attention by torch_xla's ragged paged attention, a Pallas kernel for TPUs.

    keys and values: [num_blocks, block_size, 2 * num_kv_heads, head_size], each head's value after its key

The kernel reads the block table and only the blocks of a request; XLA's operations gather all pages of a bucket. It is
compiled for TPUs only, and supports fewer layers than XlaAttention: see `reasons_against`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mvllm.plugin_api import AttentionSpec, BatchLayout, KVLayout, PlatformError, install_command
from mvllm_tpu import xla_devices
from mvllm_tpu.attention import Cache, XlaAttention, XlaMetadata
from mvllm_tpu.tiles import NOWHERE

VARIABLE = "MVLLM_TPU_ATTENTION"
_LANES = 128
"""Elements of a row of a chip's vector registers; a head fills whole rows."""
_BYTES = {"bfloat16": 2, "float32": 4}
_CHIPS = ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e")
"""Chips with tuned block sizes in the kernel; it rejects others."""
_LARGEST_TABLE = 1 << 19
"""Maximum bytes of a block table: half of a chip's scalar memory."""
_BLOCK_SIZES = (64, 128, 32, 16, 256)
"""Large block sizes first: the kernel stores the block table in a chip's small scalar memory."""


def kernel_chosen(spec: AttentionSpec, against: Sequence[str] = ()) -> bool:
    """Whether layers of this kind use the kernel: on a chip, if it supports them, unless VARIABLE disables it.

    Args:
        against: Further reasons against it, from the worker's configuration.

    Raises:
        PlatformError: VARIABLE requires the kernel where it cannot run, or has an invalid value.
    """
    asked = os.environ.get(VARIABLE, "auto").strip().lower()
    if asked not in ("auto", "pallas", "xla"):
        raise PlatformError(f"{VARIABLE}={asked!r} names no attention. Unset it, or set it to pallas or xla.")
    if asked == "xla":
        return False
    reasons, devices = [*PallasAttention.reasons_against(spec), *against], xla_devices.find()
    if devices.on_host:
        reasons.append("XLA's CPU device runs no kernels of chips")
    elif others := sorted(set(devices.names) - set(_CHIPS)):
        reasons.append(f"it is for {', '.join(_CHIPS)}, and this is {', '.join(others)}")
    if reasons and asked == "pallas":
        raise PlatformError(f"{VARIABLE}=pallas asks for a kernel that is not for this model: {'; '.join(reasons)}.")
    return not reasons


def _fills_tiles(spec: AttentionSpec) -> bool:
    """Whether the kernel can split the heads of a token's keys and values, packed in 32-bit words, along registers."""
    words, rest = divmod(2 * spec.num_kv_heads * _BYTES[spec.kv_dtype], 4)
    return rest == 0 and (words in (1, 2, 4) or words % 8 == 0)


@dataclass(frozen=True)
class PallasMetadata:
    """Metadata of one step. All tensors are int32, on the device.

    Attributes:
        slots: [T]: slot of each token; NOWHERE for padding.
        seq_lens: [R].
        block_table: [R, pages]. Undefined after a request's blocks.
        query_start_loc: [R + 1].
        num_requests: [1]: number of real requests, which come first.
    """

    slots: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    num_requests: torch.Tensor


class PallasAttention(XlaAttention):
    """XlaAttention whose `forward` uses the kernel."""

    @classmethod
    def reasons_against(cls, spec: AttentionSpec) -> list[str]:
        """Why the kernel does not support these layers; empty if it does."""
        reasons = cls.validate(spec)
        if spec.head_size % _LANES or spec.value_size != spec.head_size:
            reasons.append(f"heads of {spec.head_size} and {spec.value_size} elements are not multiples of {_LANES}")
        if spec.kv_dtype in _BYTES and not _fills_tiles(spec):
            reasons.append(f"keys and values of {spec.num_kv_heads} heads in {spec.kv_dtype} do not fill whole tiles")
        if spec.values_in_keys:
            reasons.append("values lie in the keys")
        if spec.sinks:
            reasons.append("it has no sinks")
        if spec.kv_dtype != spec.dtype:
            reasons.append(f"keys and values are stored as {spec.kv_dtype}, computed with as {spec.dtype}")
        if importlib.util.find_spec("jax") is None:
            reasons.append(f"jax is not installed, which compiles it: {install_command('mvllm-tpu[pallas]')}")
        return reasons

    def kv_layout(self) -> KVLayout:
        return KVLayout(_BLOCK_SIZES, super().kv_layout().bytes_per_token)

    def build_metadata(self, batch: BatchLayout) -> PallasMetadata | XlaMetadata:  # type: ignore[override]
        """Metadata for the kernel, or for XLA's operations if the block table is too large."""
        if batch.block_table_device.numel() * 4 > _LARGEST_TABLE:
            return super().build_metadata(batch)
        slots = np.where(batch.slot_mapping < 0, NOWHERE, batch.slot_mapping).astype(np.int32)
        num_requests = int(np.count_nonzero(batch.seq_lens))  # padding has length 0 and comes last
        packed = torch.from_numpy(np.append(slots, np.int32(num_requests))).to(batch.block_table_device.device)
        return PallasMetadata(
            packed[: len(slots)],
            batch.seq_lens_device,
            batch.block_table_device,
            batch.query_start_loc_device,
            packed[len(slots) :],
        )

    def write_kv(
        self, kv: Cache, key: torch.Tensor, value: torch.Tensor, metadata: PallasMetadata | XlaMetadata
    ) -> None:
        [cache] = kv
        self.reuse_buffer(cache)
        pairs = torch.stack((key, value), dim=2).flatten(1, 2)
        cache.flatten(0, 1).index_copy_(0, metadata.slots.long(), pairs.to(cache.dtype))

    def forward(
        self,
        query: torch.Tensor,
        kv: Cache,
        metadata: PallasMetadata | XlaMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(metadata, XlaMetadata):
            return super().forward(query, kv, metadata, sinks)
        [cache] = kv
        found = self.kernel(
            query,
            cache,
            metadata.seq_lens,
            metadata.block_table.clamp(0, len(cache) - 1),  # the kernel prefetches blocks after a request's last one
            metadata.query_start_loc,
            metadata.num_requests,
            sm_scale=self.spec.scale,
            sliding_window=self.spec.sliding_window,
            soft_cap=self.spec.soft_cap,
        )
        return found.flatten(1)

    @staticmethod
    def kernel(*tensors: torch.Tensor, **settings: float | None) -> torch.Tensor:
        """Attention output [T, num_heads, head_size]; undefined for padding."""
        from torch_xla.experimental.custom_kernel import ragged_paged_attention

        found: torch.Tensor = ragged_paged_attention(*tensors, **settings)
        return found

    def _gathered(self, kv: Cache, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        [cache] = kv
        self.reuse_buffer(cache)
        pairs = cache.index_select(0, blocks.clamp(0, len(cache) - 1))
        return pairs[:, :, 0::2], pairs[:, :, 1::2]

    def _parts(self) -> tuple[tuple[int, int], ...]:
        return ((2 * self.spec.num_kv_heads, self.spec.head_size),)
