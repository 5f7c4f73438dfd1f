"""Attention on lazy tensors, whose memory is allocated when the graph runs."""

from __future__ import annotations

import torch
import torch_xla

from mvllm_tpu.attention import XlaAttention
from mvllm_tpu.lazy_runtime import require_room
from mvllm_tpu.pallas_attention import PallasAttention


class LazyAttention(XlaAttention):
    """XlaAttention on lazy tensors."""

    def require_room(self, size: int, device: torch.device) -> None:
        require_room(size, device, "The KV cache of a layer")

    def materialize(self) -> None:
        torch_xla.sync(wait=True)


class LazyPallasAttention(PallasAttention, LazyAttention):
    """PallasAttention on lazy tensors."""
