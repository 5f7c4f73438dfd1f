"""WeightTransferGroup: the process group over which a trainer broadcasts weights to the workers of engines.

The trainer is rank 0 and listens; the workers connect. The group is independent of torch's default process group,
which the trainer and the engine may have for themselves:

    trainer   rank 0                                broadcasts
    workers   rank_offset, rank_offset + 1, ...     receive; another engine has another rank_offset
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mvllm.distributed.weight_transfer_rendezvous import TRAINER, incomplete, meet
from mvllm.errors import RequestError
from mvllm.messages.weights import HOST_BACKEND, WeightTransferInfo

if TYPE_CHECKING:
    import torch

_GRACE_SECONDS = 2.0
"""After the timeout, for the error of the thread to arrive, which says more."""


class WeightTransferGroup:
    """One rank of the group. The constructor returns when all ranks have joined.

    Args:
        info: The group.
        rank: This process' rank in it; 0 for the trainer.
        given_up: Another thread sets it to stop waiting for the other ranks.

    Attributes:
        on_host: Whether tensors must be in the host's memory.

    Raises:
        RequestError: The group cannot be joined within its timeout, or torch does not have the backend.
    """

    def __init__(self, info: WeightTransferInfo, rank: int = TRAINER, given_up: threading.Event | None = None) -> None:
        _check_rank(info, rank)
        self.on_host = info.backend == HOST_BACKEND
        self._group: Any = None
        self._store: Any = None  # the trainer's accepts connections as long as it exists
        import torch.distributed as dist  # here: the class is a name of the package, which resolves without torch
        from torch.distributed import distributed_c10d

        try:
            self._store, group_id = meet(info, rank, given_up or threading.Event())
            # torch.distributed has no public function for a group outside of the default one.
            self._group, _ = distributed_c10d._new_process_group_helper(
                info.world_size,
                rank,
                [],
                dist.Backend(info.backend),
                distributed_c10d.PrefixStore("mvllm-weights", self._store),
                group_name=f"mvllm-weights-{group_id}",  # type: ignore[arg-type]
                timeout=timedelta(seconds=info.timeout),
            )
            distributed_c10d._world.pg_group_ranks[self._group] = {i: i for i in range(info.world_size)}
        except (RuntimeError, ValueError) as e:
            self._store = None  # frees the port for another attempt
            if isinstance(e, RequestError):
                raise
            raise RequestError(
                f"The weight transfer group at {info.master_address}:{info.master_port} cannot be joined as rank "
                f"{rank} of {info.world_size} with backend {info.backend!r}: {e}"
            ) from e

    @staticmethod
    def describe(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """`names`, `dtype_names` and `shapes` of tensors, as `update_weights` takes them for a broadcast."""
        pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        return {
            "names": [name for name, _ in pairs],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in pairs],
            "shapes": [list(tensor.shape) for _, tensor in pairs],
        }

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Sends the trainer's tensor to all ranks, in place."""
        import torch.distributed as dist

        dist.broadcast(tensor, src=TRAINER, group=self._group)

    def send(self, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Broadcasts the trainer's tensors in this order, while the engine runs `update_weights(**describe(...))`."""
        for _, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            held = tensor.detach().contiguous()
            self.broadcast(held.cpu() if self.on_host else held)

    def close(self) -> None:
        """Leaves the group; the trainer's port is free again. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            import torch.distributed as dist

            dist.destroy_process_group(group)
        self._store = None


class JoiningWeightTransferGroup:
    """Joins a group in a thread of its own, so that the caller's thread goes on.

    Args:
        info: The group.
        rank: This process' rank in it.

    Attributes:
        address: Where the trainer is expected.

    Raises:
        RequestError: The rank is outside of the group.
    """

    def __init__(self, info: WeightTransferInfo, rank: int) -> None:
        _check_rank(info, rank)
        self.address = f"{info.master_address}:{info.master_port}"
        self._info, self._rank = info, rank
        self._deadline = time.monotonic() + info.timeout
        self._given_up = threading.Event()
        self._group: Future[WeightTransferGroup] = Future()
        # A daemon: torch's wait must not delay the end of the process.
        threading.Thread(target=self._join, name="weight-transfer-join", daemon=True).start()

    def poll(self) -> WeightTransferGroup | None:
        """The group once it is complete; None before.

        Raises:
            RequestError: It cannot be joined, or the timeout has passed.
        """
        if self._group.done():
            return self._group.result()
        if time.monotonic() < self._deadline + _GRACE_SECONDS:
            return None
        self.give_up()
        raise incomplete(self._info, f"rank {self._rank} of {self._info.world_size} waits for the other ranks")

    def give_up(self) -> None:
        """Stops waiting. If the group is completed later, this rank leaves it."""
        self._given_up.set()
        self._group.add_done_callback(lambda done: None if done.exception() is not None else done.result().close())

    def _join(self) -> None:
        try:
            self._group.set_result(WeightTransferGroup(self._info, self._rank, self._given_up))
        except BaseException as e:  # noqa: BLE001  (raised by `poll`)
            self._group.set_exception(e)


def _check_rank(info: WeightTransferInfo, rank: int) -> None:
    if not 0 <= rank < info.world_size:
        raise RequestError(
            f"Rank {rank} is outside of a group of {info.world_size} ranks: the trainer and all workers count. "
            "Raise world_size, or check rank_offset.",
            parameter="world_size",
        )
