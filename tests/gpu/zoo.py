"""Checkpoints of the tests' zoo, made once for all items of a run."""

from __future__ import annotations

import fcntl
from pathlib import Path

from tests.gpu.settings import Settings


def zoo_checkpoint(name: str, settings: Settings) -> Path:
    """The folder of one of the zoo's checkpoints. Of processes that ask at the same time, one makes it."""
    from tests.helpers.model_zoo import make_checkpoint

    zoo = settings.scratch / "zoo"
    zoo.mkdir(parents=True, exist_ok=True)
    folder, complete = zoo / name, zoo / f"{name}.complete"
    with (zoo / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            make_checkpoint(name, folder)
            complete.touch()
    return folder
