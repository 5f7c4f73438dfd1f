"""RankExchange: all-gathers bytes between ranks before they have a communicator, through a TCP key-value store.

It is used during the start. It needs no device and no collective, so it also provides the rendezvous address of the
communicators.
"""

from __future__ import annotations

import itertools
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

_serial = itertools.count()
"""Counts the engines of this process, so that ranks that build the same engines in the same order share keys."""


class RankExchange:
    """Connects to the other ranks at the launcher's address (`MASTER_ADDR`, `MASTER_PORT`).

    Args:
        rank, world_size: As in the environment.
        host: The address of rank 0, as all ranks reach it.
        timeout: Seconds to wait for other ranks, each time.

    Attributes:
        init_method: A rendezvous address for the communicators of this engine.
    """

    def __init__(self, rank: int, world_size: int, host: str, timeout: float = 300.0) -> None:
        self._rank, self._world_size = rank, world_size
        self._round = itertools.count()
        limit = timedelta(seconds=timeout)
        shared, _, _ = next(rendezvous("env://", rank, world_size, timeout=limit))
        self._shared = shared = PrefixStore(f"mvllm/{next(_serial)}", shared)
        # The exchange uses the launcher's store, which outlives every rank. The communicators use a new store, because
        # torch's keys would collide with those of an earlier engine; it is not needed after the rendezvous.
        if rank == 0:
            # Torch's rendezvous opens the same port in this process again; both share one server.
            self._store = TCPStore(
                host, 0, None, is_master=True, timeout=limit, wait_for_workers=False, multi_tenant=True
            )
            shared.set("port", str(self._store.port))
        else:
            port = int(shared.get("port"))
            self._store = TCPStore(host, port, None, is_master=False, timeout=limit, wait_for_workers=False)
        self.init_method = f"tcp://{host}:{self._store.port}"

    def all_gather(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, in rank order. All ranks call it the same number of times."""
        prefix = f"exchange/{next(self._round)}"
        self._shared.set(f"{prefix}/{self._rank}", payload)  # type: ignore[arg-type]  # bytes are accepted as well
        return [self._shared.get(f"{prefix}/{rank}") for rank in range(self._world_size)]
