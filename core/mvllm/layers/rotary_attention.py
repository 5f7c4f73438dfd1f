"""Attention after rotary embedding: norms of query and key heads, rotation, KV write and attention of one layer."""

from __future__ import annotations

import torch

from mvllm.layers.attention import Attention
from mvllm.layers.context import ForwardStep
from mvllm.layers.norm import Norm, RMSNorm
from mvllm.layers.rotary import CosSinRows, RotaryEmbedding
from mvllm.platform.attention import RotarySpec


class RotaryAttention:
    """Norms and rotates queries and keys, and calls the attention layer.

    Everything up to attention is one call of the backend if it has a `rotary_writer`, and otherwise the operations
    `rms_norm` and `rotary_embedding`, and `write_kv`. Not a module: it owns no parameters.

    Args:
        attention: The attention layer.
        rotary: The rotary embedding; None for a layer without positional encoding (NoPE).
        q_norm, k_norm: Norms of each query head and each key head; None without them.
        norms_last: The norms come after the rotary embedding instead of before it.
        is_ordered: As in RotaryEmbedding.forward.
    """

    def __init__(
        self,
        attention: Attention,
        rotary: RotaryEmbedding | None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        *,
        norms_last: bool = False,
        is_ordered: bool = False,
    ) -> None:
        self._attention, self._rotary = attention, rotary
        self._q_norm, self._k_norm, self._norms_last = q_norm, k_norm, norms_last
        self._is_ordered = is_ordered
        norms = [norm for norm in (q_norm, k_norm) if norm is not None]
        rms_norms = [norm for norm in norms if isinstance(norm, RMSNorm)]
        # Norms that a backend does not fuse run before it.
        self._fuses_norm = len(rms_norms) == 2 and rms_norms[0].eps == rms_norms[1].eps
        self._writer = None
        if rotary is None or (norms and norms_last):
            return
        # Operations that the user has selected are not replaced.
        if not any(op.asked_for for op in (rotary.op, *(norm.op for norm in rms_norms))):
            eps = rms_norms[0].eps if self._fuses_norm else None
            self._writer = attention.backend.rotary_writer(
                RotarySpec(rotary.rope.rotary_dim, interleaved=rotary.interleaved and not is_ordered, norm_eps=eps)
            )

    def __call__(
        self, angles: CosSinRows, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: ForwardStep
    ) -> torch.Tensor:
        """Arguments and result are those of `RotaryEmbedding` and of `Attention`; storage may be reused."""
        layer, q_norm, k_norm = self._attention, self._q_norm, self._k_norm
        if self._writer is None or layer.kv_cache is None:
            if not self._norms_last:
                query, key = self._normed(query, key)
            if self._rotary is not None:
                query, key = self._rotary(angles, query, key, is_ordered=self._is_ordered)
            if self._norms_last:
                query, key = self._normed(query, key)
            return layer(query, key, value, step)
        if not self._fuses_norm:
            query, key = self._normed(query, key)
        weights = (q_norm.weight, k_norm.weight) if self._fuses_norm and q_norm and k_norm else (None, None)
        metadata = step.metadata[layer.metadata_key]
        query = self._writer(layer.kv_cache, query, key, value, metadata, angles.index, angles.cos_sin, *weights)
        return layer.attend(query, metadata)

    def _normed(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._q_norm is None or self._k_norm is None:
            return query, key
        return self._q_norm(query), self._k_norm(key)
