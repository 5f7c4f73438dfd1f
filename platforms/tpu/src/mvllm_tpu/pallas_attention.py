"""Paged attention by a kernel for the chip: torch_xla's ragged paged attention, which is written in Pallas.

    keys and values: [num_blocks, block_size, 2 * num_kv_heads, head_size], each head's values behind its keys

The kernel reads the block table itself, and only the blocks that a request has, where XLA's operations gather all that
a bucket has room for. It is compiled for TPUs alone, and takes less than XlaAttention does: see `reasons_against`.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import numpy as np
import torch

from mvllm.plugin_api import AttentionSpec, BatchLayout, KVLayout, PlatformError
from mvllm_tpu import machine
from mvllm_tpu.attention import Cache, XlaAttention
from mvllm_tpu.tiles import NOWHERE

VARIABLE = "MVLLM_TPU_ATTENTION"
_LANES = 128
"""Elements side by side in a chip's registers: a head fills whole ones."""
_BLOCK_SIZES = (64, 128, 32, 16, 256)
"""Larger ones than XlaAttention's come first: the kernel keeps the block table in a chip's small memory of scalars."""


def kernel_chosen(spec: AttentionSpec) -> bool:
    """Whether layers of this kind go through the kernel: on a chip, wherever it takes them, unless VARIABLE says not.

    Raises:
        PlatformError: VARIABLE asks for the kernel where it cannot run, or for something else.
    """
    asked = os.environ.get(VARIABLE, "auto").strip().lower()
    if asked not in ("auto", "pallas", "xla"):
        raise PlatformError(f"{VARIABLE}={asked!r} names no attention. Unset it, or set it to pallas or xla.")
    if asked == "xla":
        return False
    reasons = PallasAttention.reasons_against(spec)
    if machine.find().on_host:
        reasons.append("XLA's CPU device runs no kernels of chips")
    if reasons and asked == "pallas":
        raise PlatformError(f"{VARIABLE}=pallas asks for a kernel that is not for this model: {'; '.join(reasons)}.")
    return not reasons


@dataclass(frozen=True)
class PallasMetadata:
    """What one step needs. All int32, on the device.

    Attributes:
        slots: [T]: where each token is stored; NOWHERE for padding.
        seq_lens: [R].
        block_table: [R, pages].
        query_start_loc: [R + 1].
        num_requests: [1]: how many of the R are real; these come first.
    """

    slots: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    num_requests: torch.Tensor


class PallasAttention(XlaAttention):
    """Attention by the kernel; see XlaAttention for what is the same."""

    @classmethod
    def reasons_against(cls, spec: AttentionSpec) -> list[str]:
        """Why the kernel is not for these layers; empty where it is."""
        reasons = cls.validate(spec)
        if spec.head_size % _LANES or spec.value_size != spec.head_size:
            reasons.append(f"heads of {spec.head_size} and {spec.value_size} elements are not multiples of {_LANES}")
        if spec.values_in_keys:
            reasons.append("values lie in the keys")
        if spec.sinks:
            reasons.append("it has no sinks")
        if spec.kv_dtype != spec.dtype:
            reasons.append(f"keys and values are stored as {spec.kv_dtype}, computed with as {spec.dtype}")
        if importlib.util.find_spec("jax") is None:
            reasons.append("jax is not installed, which compiles it: pip install 'mvllm-tpu[pallas]'")
        return reasons

    def kv_layout(self) -> KVLayout:
        return KVLayout(_BLOCK_SIZES, super().kv_layout().bytes_per_token)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> Cache:
        self._num_blocks = num_blocks
        return super().allocate(num_blocks, block_size, device)

    def build_metadata(self, batch: BatchLayout) -> PallasMetadata:  # type: ignore[override]
        slots = np.where(batch.slot_mapping < 0, NOWHERE, batch.slot_mapping).astype(np.int32)
        num_requests = int(np.count_nonzero(batch.seq_lens))  # padding has none, and comes last
        packed = torch.from_numpy(np.append(slots, np.int32(num_requests))).to(batch.block_table_device.device)
        return PallasMetadata(
            packed[: len(slots)],
            batch.seq_lens_device,
            batch.block_table_device.clamp(0, self._num_blocks - 1),  # it fetches blocks ahead, past a request's last
            batch.query_start_loc_device,
            packed[len(slots) :],
        )

    def write_kv(self, kv: Cache, key: torch.Tensor, value: torch.Tensor, metadata: PallasMetadata) -> None:  # type: ignore[override]
        [cache] = kv
        pairs = torch.stack((key, value), dim=2).flatten(1, 2)
        cache.flatten(0, 1).index_copy_(0, metadata.slots.long(), pairs.to(cache.dtype))

    def forward(  # type: ignore[override]
        self, query: torch.Tensor, kv: Cache, metadata: PallasMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        [cache] = kv
        found = self.kernel(
            query,
            cache,
            metadata.seq_lens,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.num_requests,
            sm_scale=self.spec.scale,
            sliding_window=self.spec.sliding_window,
            soft_cap=self.spec.soft_cap,
        )
        return found.flatten(1)

    @staticmethod
    def kernel(*tensors: torch.Tensor, **settings: float | None) -> torch.Tensor:
        """[T, num_heads, head_size]; what it gives for padding is nobody's."""
        from torch_xla.experimental.custom_kernel import ragged_paged_attention

        found: torch.Tensor = ragged_paged_attention(*tensors, **settings)
        return found

    def _parts(self) -> tuple[tuple[int, int], ...]:
        return ((2 * self.spec.num_kv_heads, self.spec.head_size),)
