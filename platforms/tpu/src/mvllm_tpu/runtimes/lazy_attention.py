"""Attention on lazy tensors, whose memory is allocated when the graph runs."""

from __future__ import annotations

import torch
import torch_xla

from mvllm_tpu.attention import XlaAttention
from mvllm_tpu.lazy_runtime import require_room
from mvllm_tpu.pallas_attention import PallasAttention


def materialize() -> None:
    """Runs the recorded operations."""
    torch_xla.sync(wait=True)


def reuse_buffer(tensor: torch.Tensor) -> None:
    """Called before a KV cache or state is written in a step: the program writes to the tensor's own memory.

    A lazy step does so without this mark; torch.compile otherwise returns the written tensor as a new one.
    """
    if torch.compiler.is_compiling():
        torch.ops.xla.dynamo_set_buffer_donor_(tensor, True)


class LazyAttention(XlaAttention):
    """XlaAttention on lazy tensors."""

    def require_room(self, size: int, device: torch.device) -> None:
        require_room(size, device, "The KV cache of a layer")

    def materialize(self) -> None:
        materialize()

    def reuse_buffer(self, cache: torch.Tensor) -> None:
        reuse_buffer(cache)


class LazyPallasAttention(PallasAttention, LazyAttention):
    """PallasAttention on lazy tensors."""
