"""Elementwise operations of torch for `batch_invariant`: an element's bits do not depend on its place in a tensor.

torch computes exponentials and logarithms in pairs of vectors, and what is left at the end of a tensor or of a thread's
share element by element, with other functions, whose results may differ in the last bit. So the number of rows would
decide which elements differ. Here every call has whole pairs of vectors, and too few elements to be shared by threads:

    | 0 ......................... 32,703 | 32,704 ....... | padding |      pieces of whole pairs of vectors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from mvllm.plugin_api import OpProvider
from mvllm_cpu.ops import PROVIDER, only_batch_invariant

VECTORS = 64
"""Elements of two vectors of 512 bits in 16-bit dtypes: a multiple of what one iteration of torch's loop takes."""

LONGEST = 511 * VECTORS
"""Most elements of one call: torch divides 32,768 elements and more among threads."""

Elementwise = Callable[[torch.Tensor], torch.Tensor]


def providers() -> Sequence[OpProvider]:
    """One per operation. They are used with `batch_invariant` only: otherwise torch's functions are as good."""
    functions: dict[str, Elementwise] = {"sigmoid": torch.sigmoid, "silu": F.silu, "softplus": F.softplus}
    return [
        OpProvider(op, PROVIDER, _in_whole_vectors(function), only_batch_invariant, batch_invariant=True)
        for op, function in functions.items()
    ]


def _in_whole_vectors(function: Elementwise) -> Elementwise:
    def apply(x: torch.Tensor) -> torch.Tensor:
        count = x.numel()
        padded = F.pad(x.reshape(-1), (0, -count % VECTORS))
        if len(padded) <= LONGEST:
            return function(padded)[:count].view(x.shape)
        return torch.cat([function(piece) for piece in padded.split(LONGEST)])[:count].view(x.shape)

    return apply
