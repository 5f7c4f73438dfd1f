"""PipelineStage: the layers that a pipeline rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import ConfigError


@dataclass(frozen=True)
class PipelineStage:
    """A contiguous range of layers. The first stage also embeds tokens, the last computes logits.

    Attributes:
        first, stop: Layers [first, stop) are this rank's.
        is_first, is_last: Whether it is the first or the last stage.
    """

    first: int
    stop: int
    is_first: bool
    is_last: bool

    @classmethod
    def for_rank(cls, num_layers: int, pp: GroupCoordinator) -> PipelineStage:
        """This rank's stage. The remainder layers go to the stages before the last, which has the head.

            10 layers, 4 stages:   0 1 | 2 3 4 | 5 6 7 | 8 9

        Raises:
            ConfigError: There are more stages than layers.
        """
        stages, rank = pp.world_size, pp.rank_in_group
        if stages > num_layers:
            raise ConfigError(f"pipeline_parallel_size={stages} is more than the model's {num_layers} layers.")
        sizes = [num_layers // stages] * stages
        for extra in range(num_layers % stages):
            sizes[-2 - extra] += 1
        first = sum(sizes[:rank])
        return cls(first, first + sizes[rank], pp.is_first, pp.is_last)
