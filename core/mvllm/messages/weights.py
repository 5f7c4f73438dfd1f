"""Messages about weights that change while an engine runs: the source of an update, and the trainer's process group."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from mvllm.contract import Phase, phase

HOST_BACKEND = "gloo"
"""The backend of torch.distributed for tensors in the host's memory."""


@phase(Phase.WORKER)
class WeightSource(enum.StrEnum):
    """Where the tensors of an update are.

    FOLDER          a checkpoint folder, in any format that the loader reads
    SHARED_MEMORY   a safetensors file in a segment of shared memory, `/dev/shm/<path>`
    BROADCAST       the trainer broadcasts them, in the order of `names`, see WeightTransferInfo
    TENSORS         the caller's process, which is the worker's own
    """

    FOLDER = "folder"
    SHARED_MEMORY = "shared_memory"
    BROADCAST = "broadcast"
    TENSORS = "tensors"


@phase(Phase.WORKER)
class WeightUpdate(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Some or all tensors of a checkpoint, by their names in the checkpoint.

    Attributes:
        source: Where they are.
        path: The folder, or the name of the shared memory.
        names: The tensors to load; None for all of the source. With a broadcast, all tensors that are sent.
        dtype_names: With a broadcast, torch's name of each dtype (`bfloat16`).
        shapes: With a broadcast, the shape of each tensor.
        tensors: With TENSORS, the tensors by name. Never sent to another process.
        is_only_part: No other part of the update follows, so no module may get only some of its tensors.
    """

    source: WeightSource
    path: str = ""
    names: list[str] | None = None
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    tensors: Any = None
    is_only_part: bool = False


@phase(Phase.WORKER)
class WeightTransferInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A process group of a trainer, which is rank 0, and the workers.

    Attributes:
        master_address, master_port: Where the trainer listens.
        rank_offset: Rank of the first worker in the group.
        world_size: Ranks of the group: the trainer and all workers.
        backend: A backend of torch.distributed. With `gloo` tensors are received in the host's memory, with others on
            the device.
        timeout: Seconds to wait for the group, and for each tensor.
    """

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    backend: str = HOST_BACKEND
    timeout: float = 300.0
