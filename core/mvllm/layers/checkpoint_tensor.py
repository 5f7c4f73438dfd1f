"""CheckpointTensor: a tensor of a checkpoint that is used as it is."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.weight_target import WeightTarget, whole_tensor_target


class CheckpointTensor(nn.Module):
    """A vector or table without an operation of its own. Every rank holds all of it.

    Args:
        ctx: Build context.
        name: The checkpoint tensor.
        shape: Its shape.

    Attributes:
        weight: Its values, compute dtype.
    """

    def __init__(self, ctx: BuildContext, name: str, *shape: int) -> None:
        super().__init__()
        self.name = name
        self.weight = ctx.parameter(*shape)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank."""
        yield whole_tensor_target(self.name, self.weight)
