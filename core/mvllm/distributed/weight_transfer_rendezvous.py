"""Rendezvous of the ranks of a WeightTransferGroup, over a TCPStore that the trainer opens.

A rank that waits can leave and come back under the same address: it has another attempt id each time, and the trainer
decides once which attempts are the group.

    rank r    member/r = attempt, changes + 1           waits for `group`, and joins if its attempt is in it
    leaves    member/r = "",      changes + 1           unless the trainer has closed the group before
    trainer   no member is missing, and `changes` is as before they were read: changes = closed, group = attempts

Torch's own wait (`wait_for_workers`) counts connections: a rank that came back would count twice, and the group would
be started without another rank.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from datetime import timedelta
from typing import Any

from mvllm.errors import RequestError
from mvllm.messages.weights import WeightTransferInfo

TRAINER = 0
"""Rank of the trainer."""

_POLL_SECONDS = 0.02
_CHANGES, _GROUP = "changes", "group"
_CLOSED = -(2**40)
"""The number of changes once the group is closed; it stays negative whatever is added."""


def meet(info: WeightTransferInfo, rank: int, given_up: threading.Event) -> tuple[Any, str]:
    """Returns when all ranks of the group are there.

    Args:
        info: The group.
        rank: This process' rank in it.
        given_up: Another thread sets it to stop the wait.

    Returns:
        The TCPStore, which the trainer keeps open, and the id of the group.

    Raises:
        RequestError: The group is not complete within its timeout, the wait was given up, or another process is this
            rank of the group.
        RuntimeError: The trainer's port cannot be opened.
    """
    deadline = time.monotonic() + info.timeout
    if rank == TRAINER:
        store = _open_store(info, info.timeout, is_trainer=True)
        group_id, missing = _close_group(store, info.world_size, given_up, deadline)
        if missing:
            del store  # the error keeps this frame, and the port should be free for another attempt
            ranks = ", ".join(map(str, missing))
            raise incomplete(info, f"of {info.world_size} ranks these have not joined: {ranks}")
        return store, group_id
    failure: RuntimeError | None = None
    while _wait_for_trainer(info, given_up, deadline):
        try:
            store = _open_store(info, deadline - time.monotonic(), is_trainer=False)
            return store, _enter_group(store, info, rank, given_up, deadline)
        except RuntimeError as e:  # the trainer has ended; another one may come
            failure = e
            given_up.wait(_POLL_SECONDS)
    raise incomplete(info, f"rank {rank} of {info.world_size} waits for the other ranks") from failure


def incomplete(info: WeightTransferInfo, found: str) -> RequestError:
    """The error of a group whose ranks have not all come."""
    return RequestError(
        f"The weight transfer group at {info.master_address}:{info.master_port} is not complete after "
        f"{info.timeout:g} s: {found}. Start the trainer's WeightTransferGroup and init_weight_transfer_engine of all "
        "engines at the same time, with the same world_size, or raise timeout."
    )


def _open_store(info: WeightTransferInfo, seconds: float, *, is_trainer: bool) -> Any:
    import torch.distributed as dist  # here: WeightTransferGroup is a name of the package, which resolves without torch

    return dist.TCPStore(  # type: ignore[attr-defined]
        info.master_address,
        info.master_port,
        is_master=is_trainer,
        timeout=timedelta(seconds=max(seconds, _POLL_SECONDS)),
        wait_for_workers=False,
    )


def _close_group(store: Any, world_size: int, given_up: threading.Event, deadline: float) -> tuple[str, list[int]]:
    """The trainer's part: closes the group when all members are there.

    Returns:
        The id of the group, and the ranks that have not come; the group stays open if there are any.
    """
    closed = str(_CLOSED)
    while True:
        changes = store.add(_CHANGES, 0)
        attempts = {rank: _read(store, _member(rank)) for rank in range(1, world_size)}
        missing = [rank for rank, attempt in attempts.items() if not attempt]
        if not missing and store.compare_set(_CHANGES, str(changes), closed).decode() == closed:
            break
        if given_up.is_set() or time.monotonic() >= deadline:
            return "", missing
        given_up.wait(_POLL_SECONDS)
    group_id = uuid.uuid4().hex
    store.set(_GROUP, json.dumps([group_id, list(attempts.values())]))
    return group_id, []


def _enter_group(store: Any, info: WeightTransferInfo, rank: int, given_up: threading.Event, deadline: float) -> str:
    """The part of another rank: announces an attempt, and returns the id of the group once it is closed."""
    key, attempt, has_announced = _member(rank), uuid.uuid4().hex, False
    while True:
        if not has_announced or not _read(store, key):  # an earlier attempt may withdraw after this one has come
            store.set(key, attempt)
            has_announced = True
            if store.add(_CHANGES, 1) < 0:
                break
        if store.check([_GROUP]):
            break
        if given_up.is_set() or time.monotonic() >= deadline:
            store.compare_set(key, attempt, "")
            if store.add(_CHANGES, 1) >= 0:
                raise incomplete(info, f"rank {rank} of {info.world_size} waits for the other ranks")
            break  # the group was closed meanwhile: its other ranks wait for this one, which leaves it later
        given_up.wait(_POLL_SECONDS)
    group_id, attempts = json.loads(store.get(_GROUP))  # waits for the trainer, which has closed the group
    if attempts[rank - 1] != attempt:
        raise RequestError(
            f"The weight transfer group at {info.master_address}:{info.master_port} is complete, and its rank {rank} "
            "is another process or an earlier call. Close the trainer's WeightTransferGroup and create a new one for "
            "each call of init_weight_transfer_engine; several engines need different values of rank_offset.",
            parameter="rank_offset",
        )
    return str(group_id)


def _wait_for_trainer(info: WeightTransferInfo, given_up: threading.Event, deadline: float) -> bool:
    """Waits until the trainer listens. Returns whether it does: not after the deadline, nor if the wait is given up.

    The wait of TCPStore cannot be interrupted.
    """
    address = info.master_address, info.master_port
    while not given_up.is_set() and (seconds := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection(address, timeout=min(1.0, seconds)).close()
        except OSError:
            given_up.wait(min(_POLL_SECONDS, seconds))
        else:
            return True
    return False


def _read(store: Any, key: str) -> str:
    """The value of a key, which is never deleted; empty if it has none."""
    return store.get(key).decode() if store.check([key]) else ""


def _member(rank: int) -> str:
    return f"member/{rank}"
