"""Settings of a run, shared by the parent and its child processes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.clock import SYSTEM, Clock

ROOT = Path(__file__).resolve().parents[2]
ON_THE_HOST = {
    "replayed": "tests.gpu.replayed_plugin",
    "interpreted": "tests.gpu.interpreted_plugin",
}
"""Platforms that have the host in the place of a device: for trying this script, and kernels without a device."""
HOST_PLATFORMS = ("cpu", *ON_THE_HOST)


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        platform: The platform's name.
        out: Where figures, logs and reports go.
        scratch: Where checkpoints go, until the run is over.
        deadline: When the budget is over, on the monotonic clock.
        quick: Tiny models and short measurements: whether the script works, not how fast anything is.
        only: Items to run, by a part of their name; empty for all.
        also: Environments (`NAME=VALUE`) of further ways to run the same model, for the part `graphs`.
        wheels: Folder with wheels: of packages that the machine lacks, and perhaps of the project.
    """

    platform: str
    out: Path
    scratch: Path
    deadline: float
    quick: bool = False
    only: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    wheels: Path | None = None

    def seconds_left(self, clock: Clock = SYSTEM) -> float:
        """Of the budget."""
        return self.deadline - clock.monotonic()

    @property
    def on_host(self) -> bool:
        """Whether the platform's device is the host."""
        return self.platform in HOST_PLATFORMS

    def wants(self, item: str) -> bool:
        """Whether `only` leaves an item in."""
        return not self.only or any(part in item for part in self.only)

    def to_json(self) -> str:
        """For a child's command line."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """What `to_json` wrote."""
        values = json.loads(text)
        for name in ("out", "scratch", "wheels"):
            values[name] = None if values[name] is None else Path(values[name])
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
        kind: What presets select it by, beside its name.
        obstacle: Why it is not run on this machine; empty where it is.
    """

    name: str
    needs: float = 10.0
    limit: float = 300.0
    kind: str = ""
    obstacle: str = ""
