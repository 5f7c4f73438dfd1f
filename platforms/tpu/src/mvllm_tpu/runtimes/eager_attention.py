"""XlaAttention on torch_tpu's eager tensors."""

from __future__ import annotations

import torch

from mvllm_tpu.attention import XlaAttention
from mvllm_tpu.eager_runtime import require_room


class EagerAttention(XlaAttention):
    """XlaAttention that checks for free memory before an allocation."""

    def require_room(self, size: int, device: torch.device) -> None:
        require_room(size, device, "The KV cache of a layer")
