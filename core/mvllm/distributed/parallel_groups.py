"""The tensor-parallel and pipeline-parallel groups of a rank.

The ranks of a tensor-parallel group are consecutive, so that they are on one machine where possible. A pipeline group
consists of the ranks at the same position of each tensor-parallel group:

    tensor_parallel_size = 2, pipeline_parallel_size = 3         rank  0 1   2 3   4 5
                                                                 tp    0 1 | 0 1 | 0 1
    pp groups: (0, 2, 4) and (1, 3, 5)                           pp    0 0   1 1   2 2

A rank is a worker here. A worker that drives several devices holds the shards of as many consecutive tensor-parallel
ranks, and tensor_parallel_size is counted in workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mvllm.config.engine_config import ParallelConfig
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.distributed.torch_communicator import HOST_BACKEND, TorchCommunicator
from mvllm.errors import ConfigError
from mvllm.platform.checked_calls import call_checked
from mvllm.platform.communicator import Communicator
from mvllm.platform.interface import Platform
from mvllm.platform.topology import GroupSpec, WorkerContext

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ParallelGroups:
    """The groups of one rank.

    Attributes:
        tp: The ranks that each hold a shard of every layer.
        pp: The ranks that each hold a stage of consecutive layers, in order of the layers.
    """

    tp: GroupCoordinator
    pp: GroupCoordinator

    def close(self) -> None:
        """Leaves the groups in reverse order: the one joined first may own the world of the others. Idempotent."""
        self.pp.close()
        self.tp.close()


def group_ranks(parallel: ParallelConfig, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks of the tensor-parallel and of the pipeline-parallel group of `rank`."""
    tp_size = parallel.tensor_parallel_size
    first = rank - rank % tp_size
    return tuple(range(first, first + tp_size)), tuple(range(rank % tp_size, parallel.world_size, tp_size))


def join_groups(
    parallel: ParallelConfig, platform: Platform, ctx: WorkerContext, device: torch.device
) -> ParallelGroups:
    """Joins the groups of this rank. All ranks call it at the same time; a world of one rank joins none.

    Raises:
        ConfigError: The sizes do not match the number of ranks, or there is no rendezvous address.
    """
    if ctx.world_size * ctx.num_devices != parallel.world_size or parallel.tensor_parallel_size % ctx.num_devices:
        raise ConfigError(
            f"tensor_parallel_size {parallel.tensor_parallel_size} × pipeline_parallel_size "
            f"{parallel.pipeline_parallel_size} makes {parallel.world_size} ranks, but {ctx.world_size} were started"
            + (f" with {ctx.num_devices} devices each." if ctx.num_devices > 1 else ".")
        )
    if ctx.num_devices > 1:  # the devices of one worker are one rank of the group
        parallel = replace(parallel, tensor_parallel_size=parallel.tensor_parallel_size // ctx.num_devices)
    if ctx.world_size == 1:
        ranks = (ctx.rank,)
        return ParallelGroups(
            *(GroupCoordinator(GroupSpec(name, ranks, ctx.rank), local_rank=ctx.local_rank) for name in ("tp", "pp"))
        )
    if ctx.init_method is None:
        raise ConfigError(f"{ctx.world_size} ranks need a rendezvous address, but the executor set no init_method.")
    tp_ranks, pp_ranks = group_ranks(parallel, ctx.rank)
    return ParallelGroups(
        tp=_join(platform, GroupSpec("tp", tp_ranks, ctx.rank, ctx.init_method, ctx.world_size), ctx, device),
        pp=_join(platform, GroupSpec("pp", pp_ranks, ctx.rank, ctx.init_method, ctx.world_size), ctx, device),
    )


def _join(platform: Platform, spec: GroupSpec, ctx: WorkerContext, device: torch.device) -> GroupCoordinator:
    if len(spec.ranks) == 1:
        return GroupCoordinator(spec, local_rank=ctx.local_rank)
    communicator = call_checked(platform, "communicator", spec, device, returns=Communicator)
    # Joined now, not at first use: ranks reach the first use at different times and would wait for each other.
    host = None if communicator.on_host else TorchCommunicator(spec, HOST_BACKEND)
    return GroupCoordinator(spec, communicator, ctx.local_rank, host)
