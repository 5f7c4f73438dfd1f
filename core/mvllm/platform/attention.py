"""The interface of paged-attention backends: spec, KV layout, batch layout and the methods that core calls.

The KV cache of a layer is a fixed number of blocks of `block_size` tokens. A request's tokens are in the blocks that
its row of the block table lists, in order:

    block_table[r] = [7, 2, 9]   block_size = 4      token t of request r is in slot
    seq_lens[r]    = 10                              block_table[r][t // 4] * 4 + t % 4

One step contains, for each request, `query_len` new tokens at the end of its sequence. Attention is causal: a query
sees all earlier tokens of its request, whether they were computed in this step, in an earlier one, or for another
request that shares the blocks. `write_kv` therefore stores the keys and values of the whole step before `forward` reads
any.

The prompts of some models have spans (images) whose tokens also see the later tokens of their span:

    position       0  1  2  3  4  5  6         span [2, 5)
    visible_lens   1  2  5  5  5  6  7
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mvllm.contract import Phase, phase
from mvllm.errors import PlatformError
from mvllm.platform import tensor_caches
from mvllm.platform.attention_spec import AttentionSpec as AttentionSpec
from mvllm.platform.attention_spec import KVLayout as KVLayout
from mvllm.platform.block_transfer import BlockTransfer
from mvllm.platform.shapes import StepKind

if TYPE_CHECKING:
    import numpy as np
    import torch


@phase(Phase.WORKER)
@dataclass
class BatchLayout:
    """Requests, sequence lengths, block table and slots of one step. All arrays are int32.

    The argument of `build_metadata`.

    R and T are the numbers of requests and tokens after padding to the platform's ShapePolicy. A padding request has no
    tokens and a sequence of length 0. Padding tokens come last, belong to no request (`query_start_loc[R]` is the
    number of real tokens) and have slot -1. Host arrays are core's buffers: they keep this step's values until
    `build_metadata` and `forward` have returned.

    Decode rows come first (since contract 1.1): requests with one token that is not a draft token precede all others.

    Attributes:
        num_requests: R.
        num_tokens: T.
        max_query_len: Most new tokens of one request. If `capture` is set, the most that a step of this kind and shape
            can have: 1, the number of draft tokens + 1, or T.
        max_seq_len: Longest sequence, new tokens included.
        block_size: Tokens per block.
        query_start_loc: Host, [R + 1]: tokens of request r are [query_start_loc[r], query_start_loc[r + 1]).
        seq_lens: Host, [R]: tokens of each sequence after this step.
        block_table: Host, [R, max_blocks]: entries past a request's last block are unspecified. With a sliding window,
            entries of blocks that no query of the step sees are unspecified too, but are valid block numbers.
        slot_mapping: Host, [T]: slot in which each token's key and value are stored; -1 stores nothing (padding). The
            slot of token t of request r is the one that `block_table` gives, as drawn at the head of this module.
        query_start_loc_device, seq_lens_device, block_table_device, slot_mapping_device: The same on the device.
        kind: What the requests compute; since contract 1.1.
        num_decodes: Number of decode rows, which come first; since contract 1.1.
        capture: T and R are one of the shapes of `ShapePolicy.capture`; since contract 1.1.
        visible_lens: Host, [T]: the number of leading positions of its sequence that each token sees. In a span that is
            the end of the span, elsewhere the token's position + 1; keys of all these positions are stored in this
            step or were stored before. A sliding window applies in spans as elsewhere: of these positions, a token at p
            sees those > p - sliding_window. 0 for padding tokens. None in steps in which attention is causal, and for
            specs without `non_causal_spans`. Never set with `capture`. Since contract 1.1.
        visible_lens_device: The same on the device. Since contract 1.1.
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
    kind: StepKind = StepKind.MIXED
    num_decodes: int = 0
    capture: bool = False
    visible_lens: np.ndarray | None = None
    visible_lens_device: torch.Tensor | None = None


KVCache = Any
"""One layer's cache as its backend allocated it: a tensor, a tuple or list of tensors, or another object.

Core stores it and passes it back without reading it. A backend whose cache is not made of tensors also implements
`kv_bytes`, `fill` and `read_slots`, and for `Capabilities.kv_transfer` `block_format`, `export_blocks` and
`import_blocks`.
"""

AttentionMetadata = Any
"""The result of `build_metadata` for one step. Core passes it on without reading it."""


@phase(Phase.WORKER)
@dataclass(frozen=True)
class RotarySpec:
    """What a layer does to the heads of queries and keys before attention.

    Since contract 1.1. The argument of `AttentionBackend.rotary_writer`.

    Attributes:
        rotary_dim: Leading elements of a head that are rotated, even; those of the operation `rotary_embedding`.
        interleaved: The first `rotary_dim` elements of a head are first brought into the order 0, 2, 4, ... | 1, 3, 5,
            ..., after the norm.
        norm_eps: Epsilon of the RMS norms of each query and key head, which come first; None without norms.
    """

    rotary_dim: int
    interleaved: bool = False
    norm_eps: float | None = None


RotaryWriter = Callable[..., Any]
"""The result of `AttentionBackend.rotary_writer`, which core calls in each step instead of `write_kv`:

    (kv, query, key, value, metadata, index, cos_sin, q_weight, k_weight) -> query

Since contract 1.1. kv, query, key, value and metadata are those of `write_kv` and `forward`, index and cos_sin those of
the operation `rotary_embedding`. The weights are [head_size], compute dtype; None without norms. The result is the
query that `forward` takes: [T, num_heads, head_size], compute dtype. query and key may be overwritten.
"""


@phase(Phase.WORKER)
class AttentionBackend(ABC):
    """Paged attention of one platform for one AttentionSpec.

    Core creates one backend per distinct spec of the model and calls, in this order: `kv_layout` (before
    it divides the memory), `allocate` once per layer, then in each step `build_metadata` once and, per layer,
    `write_kv` and `forward`.

    Where layers have different sliding windows, the layers of one KV cache group share a block table, and a backend
    gets the table of its group; layers of equal specs in two groups have two backends. The batch layouts of a step then
    differ in block_table and slot_mapping, in whether they have `visible_lens`, and share the other arrays. Layers
    whose specs differ only in the sliding window and in `non_causal_spans` get the same cache, in which each group uses
    its own blocks, if `allocate` returns tensors of equal number, shapes, strides and dtypes.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        """Reasons why this backend does not support `spec`; empty when it does."""

    @abstractmethod
    def kv_layout(self) -> KVLayout:
        """Block sizes and bytes per token of one layer's cache. No side effects."""

    @abstractmethod
    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> KVCache:
        """One layer's cache of `num_blocks` blocks. Contents are unspecified but finite.

        Raises:
            MemoryError: It does not fit.
        """

    @abstractmethod
    def build_metadata(self, batch: BatchLayout) -> AttentionMetadata:
        """Data that `write_kv` and `forward` need in this step, for all layers. Does not wait for the device."""

    @abstractmethod
    def write_kv(self, kv: KVCache, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Stores the step's keys and values in the cache.

        Args:
            kv: The layer's cache.
            key: [T, num_kv_heads, head_size], compute dtype; rows may be strided.
            value: [T, num_kv_heads, value_size], likewise. With `values_in_keys` it is a view of `key` and is not
                stored.
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
            sinks: [num_heads], if the spec has sinks.

        Returns:
            [T, num_heads * value_size], compute dtype. Padding rows are unspecified but finite.
        """

    def rotary_writer(self, rotary: RotarySpec) -> RotaryWriter | None:
        """A function that does what comes before attention at once: norms, rotary embedding and the write.

        Optional since contract 1.1. Core asks once for each layer, while the model is built. With None, which the
        default returns, core calls the operations `rms_norm` and `rotary_embedding`, and `write_kv`. The function gives
        the same up to roundings: each head of queries and keys as `rms_norm` and `rotary_embedding` give it, keys and
        values stored as by `write_kv`, nothing for slot -1.
        """
        return None

    def select(
        self, query: torch.Tensor, weights: torch.Tensor, kv: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """The positions with the highest index scores, for each query of the step.

        Optional since contract 1.1: for specs with `indexer`. The score of position s for the query of token t is

            sum over heads h of weights[t, h] · max(0, scale · query[t, h] · key[s])

        where `scale` is the spec's. A query at position p selects among the positions [0, p].

        Args:
            query: [T, num_heads, head_size], compute dtype; rows may be strided.
            weights: [T, num_heads], float32.
            kv: The layer's cache, `write_kv` already done for the whole step.
            metadata: From `build_metadata`.

        Returns:
            [T, index_topk], int32: distinct positions in any order, of equal scores those of earlier positions. A query
            that sees fewer positions selects all; the rest of its row, which comes last, is -1. Padding rows are
            unspecified.
        """
        raise _no_sparse_attention(self, "select")

    def forward_selected(
        self, query: torch.Tensor, kv: KVCache, metadata: AttentionMetadata, positions: torch.Tensor
    ) -> torch.Tensor:
        """Attention of each query of the step over given positions of its sequence only.

        Optional since contract 1.1: for specs with `index_topk` that are no `indexer`.

        Args:
            query, kv, metadata: As in `forward`.
            positions: [T, index_topk], int32: the result of `select`, maybe of another layer's indexer. A request's row
                has at least one position, and none after its query's.

        Returns:
            As `forward`.
        """
        raise _no_sparse_attention(self, "forward_selected")

    def copy_blocks(self, kv: KVCache, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copies whole blocks within one layer's cache: `source[i]` to `destination[i]`, both int64 [n].

        Optional since contract 1.1: core does not call it. The default finds the blocks in tensors by their shapes. The
        conformance suite checks a backend that overrides it.

        Raises:
            PlatformError: As in `kv_bytes`; or the shapes of the tensors do not show where the blocks are.
        """
        tensor_caches.copy_blocks(self, kv, source, destination)

    def kv_bytes(self, kv: KVCache) -> int:
        """Bytes of a layer's cache on all devices that the worker drives.

        Since contract 1.1. The default adds up tensors. The conformance suite compares it with `kv_layout`.

        Raises:
            PlatformError: The cache is not made of tensors, and the backend does not override this method.
        """
        return tensor_caches.bytes_of(self, kv)

    def fill(self, kv: KVCache, value: float) -> None:
        """Sets every element of every stored key and value to `value`, which may be infinite or NaN.

        Since contract 1.1. The default fills tensors. The conformance suite uses it to simulate a reused cache.

        Raises:
            PlatformError: As in `kv_bytes`.
        """
        tensor_caches.fill(self, kv, value)

    def read_slots(self, kv: KVCache, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        """Copies of the contents of some slots, in their storage format.

        Since contract 1.1. The default finds the slots in tensors by their shapes. The conformance suite compares
        the contents before and after a write.

        Args:
            kv: The layer's cache.
            slots: int64 [n], on the device or the host.

        Returns:
            One tensor or several, each [n, ...], on the device: keys and values, and scales if there are any.
            Later writes do not change them.

        Raises:
            PlatformError: As in `kv_bytes`; or the shapes of the tensors do not show where the slots lie.
        """
        return tensor_caches.read_slots(self, kv, slots)

    def block_format(self, kv: KVCache, block_size: int) -> str:
        """How the bytes of `export_blocks` represent the contents of a block.

        Since contract 1.1. Backends with equal strings can import each other's blocks, also in other processes, on
        other machines and in other versions of the plugin. So the string names everything that the bytes depend on:
        storage dtype, sizes of heads, block size, order of the dimensions. It does not depend on the number of blocks.

        The default is made of the class, the spec and the shapes of tensors. A backend whose tensors of equal shapes
        may have another order overrides it.

        Args:
            kv: A layer's cache.
            block_size: The number of tokens per block with which it was allocated.

        Raises:
            PlatformError: As in `kv_bytes`; or the shapes of the tensors do not show where the blocks are.
        """
        return tensor_caches.block_format(self, kv, block_size)

    def export_blocks(self, kv: KVCache, blocks: np.ndarray, out: np.ndarray) -> BlockTransfer | None:
        """Copies whole blocks of one layer's cache to host memory.

        Since contract 1.1, for `Capabilities.kv_transfer`. The copy has what earlier calls of `write_kv` have stored,
        and nothing that later calls store. The default copies tensors and waits.

        Args:
            kv: The layer's cache.
            blocks: Host, int64 [n], distinct.
            out: Host, uint8 [n, block_size * kv_layout().bytes_per_token], contiguous: receives the bytes of block
                `blocks[i]` in row i.

        Returns:
            None if the copy is done; otherwise `out` is complete after `wait` of the result.

        Raises:
            PlatformError: As in `block_format`.
        """
        tensor_caches.export_blocks(self, kv, blocks, out)
        return None

    def import_blocks(self, kv: KVCache, blocks: np.ndarray, data: np.ndarray) -> BlockTransfer | None:
        """Replaces whole blocks of one layer's cache by bytes that `export_blocks` has returned.

        Since contract 1.1, for `Capabilities.kv_transfer`. Later calls of `forward` read the new contents, and earlier
        ones do not. Other blocks keep theirs. The default copies tensors.

        Args:
            kv: The layer's cache.
            blocks: Host, int64 [n], distinct.
            data: Host, uint8 [n, block_size * kv_layout().bytes_per_token], contiguous, not changed: row i is for block
                `blocks[i]`.

        Returns:
            None if `data` is not read any more; otherwise it is read until `wait` of the result.

        Raises:
            PlatformError: As in `block_format`.
        """
        tensor_caches.import_blocks(self, kv, blocks, data)
        return None


def _no_sparse_attention(backend: AttentionBackend, method: str) -> PlatformError:
    name = type(backend).__name__
    return PlatformError(
        f"{name} was given a spec with index_topk = {backend.spec.index_topk}, but does not implement {method}. "
        f"Implement {name}.{method}, as AttentionBackend describes it, or do not claim Capabilities.sparse_attention."
    )
