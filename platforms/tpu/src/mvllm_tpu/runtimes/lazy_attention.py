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

    def reuse_buffer(self, cache: torch.Tensor) -> None:
        # A lazy step does so without this mark; torch.compile otherwise returns the written cache as a new tensor.
        if torch.compiler.is_compiling():
            torch.ops.xla.dynamo_set_buffer_donor_(cache, True)


class LazyPallasAttention(PallasAttention, LazyAttention):
    """PallasAttention on lazy tensors."""
