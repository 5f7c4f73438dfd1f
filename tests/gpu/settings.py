"""Settings of a run, shared by the parent and its child processes."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        platform: The platform's name.
        out: Where figures, logs and reports go.
        scratch: Where checkpoints go, until the run is over.
        deadline: Seconds since the epoch when the budget is over.
        quick: Tiny models and short measurements: whether the script works, not how fast anything is.
        only: Items to run, by a part of their name; empty for all.
        also: Environments (`NAME=VALUE`) of further ways to run the same model, for the part `graphs`.
    """

    platform: str
    out: Path
    scratch: Path
    deadline: float
    quick: bool = False
    only: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    def seconds_left(self) -> float:
        """Of the budget."""
        return self.deadline - time.time()

    def wants(self, item: str) -> bool:
        """Whether `only` leaves an item in."""
        return not self.only or any(part in item for part in self.only)

    def to_json(self) -> str:
        """For a child's command line."""
        return json.dumps(dataclasses.asdict(self) | {"out": str(self.out), "scratch": str(self.scratch)})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """What `to_json` wrote."""
        values = json.loads(text)
        for name in ("out", "scratch"):
            values[name] = Path(values[name])
        for name in ("only", "also"):
            values[name] = tuple(values[name])
        return cls(**values)


@dataclass(frozen=True)
class Item:
    """Something that is run, and recorded as done, on its own.

    Attributes:
        name: Of the item, unique in its part.
        needs: Seconds below which it is not worth a start.
        limit: Seconds after which it is ended.
    """

    name: str
    needs: float = 10.0
    limit: float = 300.0
