"""Attention on lazy tensors: memory is claimed when the graph that asks for it has run."""

from __future__ import annotations

import torch
import torch_xla

from mvllm_tpu.attention import XlaAttention
from mvllm_tpu.lazy_runtime import require_room
from mvllm_tpu.pallas_attention import PallasAttention


class LazyAttention(XlaAttention):
    """See XlaAttention."""

    def require_room(self, size: int, device: torch.device) -> None:
        require_room(size, device, "The KV cache of a layer")

    def materialize(self) -> None:
        torch_xla.sync(wait=True)


class LazyPallasAttention(PallasAttention, LazyAttention):
    """See PallasAttention."""
