"""Attention over a paged KV cache: what core asks and what a platform's backend answers.

The KV cache of a layer is a fixed number of blocks of `block_size` tokens. A request's tokens live in the blocks that
its row of the block table names, in order:

    block_table[r] = [7, 2, 9]   block_size = 4      token t of request r lives in slot
    seq_lens[r]    = 10                              block_table[r][t // 4] * 4 + t % 4

One step carries, for each request, `query_len` new tokens at the end of its sequence; queries see all earlier tokens of
the same request (causal), no matter whether those were computed in this step, an earlier one, or for another request
whose blocks are shared. `write_kv` therefore stores the whole step's keys and values before `forward` reads any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mvllm.platform import tensor_caches

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class AttentionSpec:
    """One kind of attention layer, as this rank holds it. Phase: worker.

    Attributes:
        num_heads: Query heads on this rank, those of all devices that it drives together.
        num_kv_heads: Key/value heads on this rank, likewise; divides `num_heads`.
        head_size: Elements per head.
        dtype: Compute dtype by name.
        kv_dtype: Storage dtype of the cache by name. One of 8 bits comes with scales that the backend finds by itself,
            when it stores.
        scale: Factor on query-key products.
        sliding_window: A query at position p sees keys at positions > p - sliding_window; None sees all.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap); None leaves them.
        sinks: Each query head has a learned extra logit that takes part in the softmax and has no value.
        value_head_size: Elements of a value head; None stands for `head_size`.
        values_in_keys: Latent attention (MLA): values are the first `value_size` elements of the keys and are not
            stored beside them.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kv_dtype: str
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    value_head_size: int | None = None
    values_in_keys: bool = False

    @property
    def value_size(self) -> int:
        """Elements of a value head, and of each head's result."""
        return self.head_size if self.value_head_size is None else self.value_head_size

    def contradictions(self) -> list[str]:
        """Reasons why no backend could serve this spec; empty where one could."""
        reasons = []
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            reasons.append(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} key/value heads")
        if self.value_size < 1:
            reasons.append(f"value heads have {self.value_size} elements")
        if self.values_in_keys and self.value_size > self.head_size:
            reasons.append(f"{self.value_size} elements of a value do not lie in the {self.head_size} of its key")
        return reasons


@dataclass(frozen=True)
class KVLayout:
    """How a backend stores one layer's KV cache. Phase: worker, returned by `AttentionBackend.kv_layout`.

    Attributes:
        block_sizes: Tokens per block that it accepts, the preferred one first.
        bytes_per_token: Bytes one token takes in one layer, all tensors (scales, too) together, and on all devices that
            the worker drives. These share the key/value heads, if their number divides them.
    """

    block_sizes: tuple[int, ...]
    bytes_per_token: int


@dataclass
class BatchLayout:
    """Where the tokens of one step belong. All arrays are int32. Phase: worker, the argument of `build_metadata`.

    With R requests and T tokens in the step, both after padding to the platform's ShapePolicy. A request that is
    padding has no tokens and a sequence of length 0; tokens that are padding come last, belong to no request
    (`query_start_loc[R]` is the number of real tokens) and have slot -1. Host arrays are core's buffers: they hold this
    step's values until `build_metadata` and `forward` have returned, and are written again afterwards.

    Attributes:
        num_requests: R.
        num_tokens: T.
        max_query_len: Most new tokens of one request.
        max_seq_len: Longest sequence, new tokens included.
        block_size: Tokens per block.
        query_start_loc: Host, [R + 1]: tokens of request r are [query_start_loc[r], query_start_loc[r + 1]).
        seq_lens: Host, [R]: tokens of each sequence after this step.
        block_table: Host, [R, max_blocks]: entries past a request's last block are unspecified. So are, where the spec
            has a sliding window, entries of blocks that none of the step's queries see; these name some block.
        slot_mapping: Host, [T]: slot in which each token's key and value are stored; -1 stores nothing (padding).
        query_start_loc_device, seq_lens_device, block_table_device, slot_mapping_device: The same on the device.
    """

    num_requests: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    query_start_loc_device: torch.Tensor
    seq_lens_device: torch.Tensor
    block_table_device: torch.Tensor
    slot_mapping_device: torch.Tensor


KVCache = Any
"""One layer's cache as its backend made it: a tensor, a tuple or list of tensors, or an object of the backend's own.

Opaque to core, which keeps it and gives it back. A backend whose caches are no tensors implements `kv_bytes`, `fill`
and `read_slots`, too.
"""

AttentionMetadata = Any
"""What `build_metadata` made for one step. Opaque to core."""


class AttentionBackend(ABC):
    """Paged attention of one platform for one AttentionSpec.

    Phase: worker. Core makes one backend per distinct spec of the model and calls, in this order: `kv_layout` (before
    memory is divided), `allocate` once per layer, then in each step `build_metadata` once and, per layer, `write_kv`
    and `forward`.

    Where layers see different spans, those that see alike share a block table, and the backend gets the table of its
    layers; layers of equal specs with two tables have two backends. The steps' layouts then differ in block_table and
    slot_mapping, and share the other arrays. Layers whose specs differ in the sliding window alone are given the
    same cache, of which each uses blocks of its own, if what `allocate` returns is tensors that are alike in number,
    shapes, strides and dtypes.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        """Reasons why `spec` cannot run on this backend; empty when it can."""

    @abstractmethod
    def kv_layout(self) -> KVLayout:
        """Storage needs of one layer; pure."""

    @abstractmethod
    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> KVCache:
        """One layer's cache of `num_blocks` blocks. Contents are unspecified but finite.

        Raises:
            MemoryError: It does not fit.
        """

    @abstractmethod
    def build_metadata(self, batch: BatchLayout) -> AttentionMetadata:
        """Whatever `write_kv` and `forward` need for this step, for all layers. No synchronisation with the device."""

    @abstractmethod
    def write_kv(self, kv: KVCache, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Stores the step's keys and values.

        Args:
            kv: The layer's cache.
            key: [T, num_kv_heads, head_size], compute dtype; rows may be strided.
            value: [T, num_kv_heads, value_size], likewise. With `values_in_keys` it is a view of `key`, and nothing to
                store.
            metadata: From `build_metadata`.
        """

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the step's queries over the cache.

        Args:
            query: [T, num_heads, head_size], compute dtype; rows may be strided.
            kv: The layer's cache, `write_kv` already done for the whole step.
            metadata: From `build_metadata`.
            sinks: [num_heads], where the spec has sinks.

        Returns:
            [T, num_heads * value_size], compute dtype. Rows that are padding are unspecified but finite.
        """

    def copy_blocks(self, kv: KVCache, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copies whole blocks within one layer's cache: `source[i]` to `destination[i]`, both int64 [n].

        Optional since contract 1.1: core does not call it. The default finds the blocks in tensors by their shapes. The
        conformance suite checks a backend that overrides it.

        Raises:
            PlatformError: As in `kv_bytes`; or the shapes of the tensors do not show where the blocks are.
        """
        tensor_caches.copy_blocks(self, kv, source, destination)

    def kv_bytes(self, kv: KVCache) -> int:
        """Bytes that a layer's cache takes, on all devices that the worker drives.

        Since contract 1.1. The default adds up tensors. The conformance suite compares it with `kv_layout`.

        Raises:
            PlatformError: The cache is not made of tensors, and the backend has no method of its own.
        """
        return tensor_caches.bytes_of(self, kv)

    def fill(self, kv: KVCache, value: float) -> None:
        """Makes every element of every stored key and value `value`, which may be infinite or NaN.

        Since contract 1.1. The default fills tensors. The conformance suite stands in with it for an earlier tenant.

        Raises:
            PlatformError: As in `kv_bytes`.
        """
        tensor_caches.fill(self, kv, value)

    def read_slots(self, kv: KVCache, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        """Copies of all that is stored for some slots, in the form in which it is stored.

        Since contract 1.1. The default finds the slots in tensors by their shapes. The conformance suite compares
        what it read before and after a write.

        Args:
            kv: The layer's cache.
            slots: int64 [n], on the device or the host.

        Returns:
            One tensor or several, each [n, ...], on the device: keys and values, and their scales if they have any.
            Later writes do not change them.

        Raises:
            PlatformError: As in `kv_bytes`; or the shapes of the tensors do not show where the slots lie.
        """
        return tensor_caches.read_slots(self, kv, slots)
