"""XlaAttention on torch_tpu's eager tensors."""

from __future__ import annotations

import torch

from mvllm_tpu.attention import Cache, XlaAttention, XlaMetadata
from mvllm_tpu.eager_runtime import require_room


class EagerAttention(XlaAttention):
    """See XlaAttention."""

    def require_room(self, size: int, device: torch.device) -> None:
        require_room(size, device, "The KV cache of a layer")

    def write_kv(self, kv: Cache, key: torch.Tensor, value: torch.Tensor, metadata: XlaMetadata) -> None:
        slots = metadata.slots.long()  # torch takes no other indices here
        for cache, new in zip(kv, (key, value), strict=False):  # no second one where values lie in the keys
            cache.flatten(0, 1).index_copy_(0, slots, new.to(cache.dtype))
