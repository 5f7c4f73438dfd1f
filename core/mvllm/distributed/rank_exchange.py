"""Facts that ranks tell each other before they have a communicator: bytes, through a key-value store over TCP.

Only for the start. It needs no device and no collective, so it also serves to agree on where the communicators meet.
"""

from __future__ import annotations

import itertools
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

_serial = itertools.count()
"""Engines of this process so far: ranks that build the same engines in the same order find each other's keys."""


class RankExchange:
    """Meets the other ranks where the environment says (`MASTER_ADDR`, `MASTER_PORT`).

    Args:
        rank, world_size: As the environment says.
        host: Where rank 0 runs, as all ranks reach it.
        timeout: Seconds to wait for other ranks, each time.

    Attributes:
        init_method: An address of this engine's own, where communicators may meet.
    """

    def __init__(self, rank: int, world_size: int, host: str, timeout: float = 300.0) -> None:
        self._rank, self._world_size = rank, world_size
        self._round = itertools.count()
        limit = timedelta(seconds=timeout)
        shared, _, _ = next(rendezvous("env://", rank, world_size, timeout=limit))
        self._shared = shared = PrefixStore(f"mvllm/{next(_serial)}", shared)
        # What is exchanged lies in the launcher's store, which outlives every rank. The communicators meet in one of
        # their own, as torch's keys would be those of the engine before; nobody needs it once all have met.
        if rank == 0:
            # Torch's own rendezvous opens the same port in this process once more; both share one server.
            self._store = TCPStore(
                host, 0, None, is_master=True, timeout=limit, wait_for_workers=False, multi_tenant=True
            )
            shared.set("port", str(self._store.port))
        else:
            port = int(shared.get("port"))
            self._store = TCPStore(host, port, None, is_master=False, timeout=limit, wait_for_workers=False)
        self.init_method = f"tcp://{host}:{self._store.port}"

    def all_gather(self, payload: bytes) -> list[bytes]:
        """What every rank passed, in rank order. All ranks call it, the same number of times."""
        prefix = f"exchange/{next(self._round)}"
        self._shared.set(f"{prefix}/{self._rank}", payload)  # type: ignore[arg-type]  # bytes are taken, too
        return [self._shared.get(f"{prefix}/{rank}") for rank in range(self._world_size)]
