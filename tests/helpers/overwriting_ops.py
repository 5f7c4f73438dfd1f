"""Operations that overwrite what their schemas allow, as those of platforms may. Callers must not read it later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mvllm.ops.norm import layer_norm, rms_norm
from mvllm.ops.rotary import rotary_embedding
from mvllm.platform.op_provider import OpCase, OpProvider


def overwriting_providers() -> Sequence[OpProvider]:
    """Norms of sums, and rotary embeddings."""
    functions = {
        "fused_add_rms_norm": _norm_of_sum(rms_norm),
        "fused_add_layer_norm": _norm_of_sum(layer_norm),
        "rotary_embedding": _rotated_in_place,
    }
    return [OpProvider(name, "overwriting", function, _supports) for name, function in functions.items()]


def _supports(case: OpCase) -> list[str]:
    return []


def _norm_of_sum(norm: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def fused(x: torch.Tensor, residual: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        residual.add_(x)
        x.fill_(torch.nan)
        return norm(residual, *rest), residual

    return fused


def _rotated_in_place(
    index: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rotated = rotary_embedding(index, query, key, cos_sin)
    return query.copy_(rotated[0]), key.copy_(rotated[1])
