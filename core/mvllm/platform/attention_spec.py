"""What an attention backend is asked for and how it stores keys and values: AttentionSpec and KVLayout."""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.contract import Phase, phase


@phase(Phase.WORKER)
@dataclass(frozen=True)
class AttentionSpec:
    """One kind of attention layer, as this rank holds it.

    Attributes:
        num_heads: Query heads on this rank, those of all devices that it drives together.
        num_kv_heads: Key/value heads on this rank, likewise; divides `num_heads`.
        head_size: Elements per head.
        dtype: Compute dtype by name.
        kv_dtype: Storage dtype of the cache by name. For a dtype of 8 bits the backend computes the scales when it
            stores.
        scale: Factor on query-key products.
        sliding_window: A query at position p sees keys at positions > p - sliding_window; None sees all.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap); None leaves them.
        sinks: Each query head has a learned extra logit that takes part in the softmax and has no value.
        value_head_size: Elements of a value head; None means `head_size`.
        values_in_keys: Multi-head latent attention (MLA): values are the first `value_size` elements of the keys and
            are not stored separately.
        batch_invariant: A token's result has the same bits in every step, whatever else is in the step, however its
            request was cut into steps, and whether earlier tokens were found in the prefix cache. Core sets it only if
            `Capabilities.batch_invariant` is claimed. Since contract 1.1.
        index_topk: Sparse attention: each query attends to at most so many positions, which an indexer selects. Core
            calls `forward_selected` instead of `forward`. Core sets it only if `Capabilities.sparse_attention` is
            claimed. Since contract 1.1.
        indexer: The layer is such an indexer: it has keys only, and core calls `select` instead of `forward`. Since
            contract 1.1.
        non_causal_spans: Prompts may have spans whose tokens see each other in both directions: steps may have
            `BatchLayout.visible_lens`. Core sets it only if `Capabilities.non_causal_spans` is claimed. Since contract
            1.1.
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
    batch_invariant: bool = False
    index_topk: int | None = None
    indexer: bool = False
    non_causal_spans: bool = False

    @property
    def value_size(self) -> int:
        """Elements of a value head, and of each head's result."""
        return self.head_size if self.value_head_size is None else self.value_head_size

    def contradictions(self) -> list[str]:
        """Reasons why no backend can serve this spec; empty where one can."""
        reasons = []
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            reasons.append(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} key/value heads")
        if self.value_size < 1:
            reasons.append(f"value heads have {self.value_size} elements")
        if self.values_in_keys and self.value_size > self.head_size:
            reasons.append(f"{self.value_size} elements of a value do not lie in the {self.head_size} of its key")
        return reasons + self._sparse_contradictions()

    def _sparse_contradictions(self) -> list[str]:
        if self.index_topk is None:
            return ["an indexer has no index_topk"] if self.indexer else []
        reasons = []
        if self.index_topk < 1:
            reasons.append(f"{self.index_topk} positions are selected")
        if not self.values_in_keys or self.num_kv_heads != 1:
            reasons.append("sparse attention needs one key/value head with the values in its keys")
        if self.sliding_window is not None or self.soft_cap is not None or self.sinks:
            reasons.append("sparse attention has no sliding window, no soft cap and no sinks")
        if self.non_causal_spans:
            reasons.append("sparse attention is causal")
        return reasons


@phase(Phase.WORKER)
@dataclass(frozen=True)
class KVLayout:
    """How a backend stores one layer's KV cache. Returned by `AttentionBackend.kv_layout`.

    Attributes:
        block_sizes: Supported numbers of tokens per block, the preferred one first.
        bytes_per_token: Bytes of one token in one layer, all tensors (scales included) together, on all devices that
            the worker drives. The devices share the key/value heads if their number divides them.
    """

    block_sizes: tuple[int, ...]
    bytes_per_token: int
