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
        rotary: The rotary embedding.
        q_norm, k_norm: Norms of each query head and each key head; None without them.
    """

    def __init__(
        self, attention: Attention, rotary: RotaryEmbedding, q_norm: Norm | None = None, k_norm: Norm | None = None
    ) -> None:
        self._attention, self._rotary = attention, rotary
        self._q_norm, self._k_norm = q_norm, k_norm
        norms = [norm for norm in (q_norm, k_norm) if norm is not None]
        rms_norms = [norm for norm in norms if isinstance(norm, RMSNorm)]
        # Norms that a backend does not fuse run before it.
        self._fuses_norm = len(rms_norms) == 2 and rms_norms[0].eps == rms_norms[1].eps
        self._writer = None
        # Operations that the user has selected are not replaced.
        if not any(op.asked_for for op in (rotary.op, *(norm.op for norm in rms_norms))):
            eps = rms_norms[0].eps if self._fuses_norm else None
            self._writer = attention.backend.rotary_writer(
                RotarySpec(rotary.rope.rotary_dim, interleaved=rotary.interleaved, norm_eps=eps)
            )

    def __call__(
        self, angles: CosSinRows, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: ForwardStep
    ) -> torch.Tensor:
        """Arguments and result are those of `RotaryEmbedding` and of `Attention`; storage may be reused."""
        layer, q_norm, k_norm = self._attention, self._q_norm, self._k_norm
        fused = self._writer is not None and layer.kv_cache is not None
        if q_norm is not None and k_norm is not None and not (fused and self._fuses_norm):
            query, key = q_norm(query), k_norm(key)
        if self._writer is None or layer.kv_cache is None:
            query, key = self._rotary(angles, query, key)
            return layer(query, key, value, step)
        weights = (q_norm.weight, k_norm.weight) if self._fuses_norm and q_norm and k_norm else (None, None)
        metadata = step.metadata[layer.metadata_key]
        query = self._writer(layer.kv_cache, query, key, value, metadata, angles.index, angles.cos_sin, *weights)
        return layer.attend(query, metadata)
