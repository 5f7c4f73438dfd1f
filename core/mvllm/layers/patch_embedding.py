"""PatchEmbedding: the convolution at the entrance of a vision tower, as a matrix product.

Its kernel is as large as its stride, so each patch of pixels is one row of the product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.linear import resolve_linear_op, unloaded_linear_op
from mvllm.layers.quantization.quantized_matrix import Product
from mvllm.layers.weight_target import WeightTarget, whole_tensor_target


class PatchEmbedding(nn.Module):
    """Patches to vectors. Every rank holds the whole matrix.

    Args:
        ctx: Build context.
        name: The checkpoint module, a convolution.
        shape: Of a patch as the checkpoint stores it: channels, then the sides of the kernel.
        size: Elements of a vector.
        bias: Whether there is a bias.
    """

    weight: Any

    def __init__(self, ctx: BuildContext, name: str, shape: Sequence[int], size: int, *, bias: bool) -> None:
        super().__init__()
        self.name = name
        self.patch_elements = math.prod(shape)
        self.weight = ctx.parameter(size, *shape)
        self.bias = ctx.parameter(size) if bias else None
        self._op = ctx.op("linear", in_features=self.patch_elements, out_features=size, bias=bias)
        self._linear: Product = unloaded_linear_op

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[n, elements of a patch], in the order of `shape`, to [n, size]."""
        return self._linear(patches, self.weight, self.bias)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank. Before `prepare_weights` only."""
        yield whole_tensor_target(f"{self.name}.weight", self.weight)
        if self.bias is not None:
            yield whole_tensor_target(f"{self.name}.bias", self.bias)

    def prepare_weights(self) -> None:
        """Prepares the loaded weight for the linear op, as a matrix [size, elements of a patch]."""
        matrix = nn.Parameter(self.weight.data.flatten(1), requires_grad=False)
        self._linear, prepared = resolve_linear_op(matrix, self._op)
        del self.weight
        self.weight = prepared


def image_patches(pixels: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Cuts images into patches, row by row; what is left at the right and below is not used.

    Args:
        pixels: [n, channels, height, width].
        patch_size: Pixels along each side of a patch.

    Returns:
        [n, rows * columns of patches, channels * patch_size * patch_size].
    """
    n, channels, height, width = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    pixels = pixels[:, :, : rows * patch_size, : columns * patch_size]
    tiles = pixels.reshape(n, channels, rows, patch_size, columns, patch_size)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(n, rows * columns, channels * patch_size * patch_size)
