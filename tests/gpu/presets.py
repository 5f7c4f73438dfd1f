"""Presets: what is worth running on a device that is there for minutes only, the most valuable first.

    install-and-numerics    300 s: does what is installed run, and are its results right
    conformance-and-speed   480 s: which clauses pass, and how far from the device's limits it is

A preset is an order of steps within one budget. Each step may start items for a share of the budget; what it did not
reach is tried again when all steps have had their turn, and has a row "not run" if there is no time then, either.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.gpu.graphs import KINDS
from tests.gpu.parity import FIRST_OF_FAMILY
from tests.gpu.parts import Part, load
from tests.gpu.result_log import NOT_RUN, ResultLog, Row
from tests.gpu.runner import Runner
from tests.gpu.settings import Item, Settings


@dataclass(frozen=True)
class Step:
    """Items of one part.

    Attributes:
        part: Its name.
        items: Patterns of the names of its items, as of files; without any, all.
        kind: Only items of this kind; empty for all.
        share: Of the budget, in which items are started.
    """

    part: str
    items: tuple[str, ...] = ()
    kind: str = ""
    share: float = 1.0

    def wants(self, item: Item) -> bool:
        """Whether the step has an item."""
        named = not self.items or any(fnmatchcase(item.name, pattern) for pattern in self.items)
        return named and self.kind in ("", item.kind)


@dataclass(frozen=True)
class Preset:
    """Steps, the most valuable first, within one budget of so many seconds."""

    name: str
    about: str
    seconds: float
    steps: tuple[Step, ...]


_INSTALL_AND_NUMERICS = Preset(
    "install-and-numerics",
    "built wheels in an empty folder with doctor, generate and serve; numerics of kernels, cuDNN's attention among "
    "them; bfloat16 parity of the first checkpoint of each family; captured steps against eager ones; two kernels "
    "under compute-sanitizer",
    300.0,
    (
        Step("environment", share=0.1),
        Step("wheels", share=0.3),
        Step("kernels", ("cudnn*",), share=0.2),
        Step("conformance", ("ATT", "OPS", "SMP"), share=0.3),
        Step("graphs", tuple(f"{model}:float32" for model in KINDS), share=0.3),
        Step("parity", ("*:bfloat16",), kind=FIRST_OF_FAMILY, share=0.4),
        Step("sanitizer", share=0.3),
    ),
)
_CONFORMANCE_AND_SPEED = Preset(
    "conformance-and-speed",
    "the conformance suite by clause family; the device's limits; decode steps and prompts of Llama-3.1-8B, "
    "Qwen3-30B-A3B, AWQ, FP8-block, MXFP4, MLA and hybrid models; the sampler; a server under load; kernels of "
    "FlashInfer and torch beside ours",
    480.0,
    (
        Step("environment", ("device",), share=0.05),
        Step("bench", ("ceilings",), share=0.1),
        Step("conformance", share=0.4),
        Step("speed", share=0.4),
        Step("library_kernels", share=0.2),
    ),
)
PRESETS = {preset.name: preset for preset in (_INSTALL_AND_NUMERICS, _CONFORMANCE_AND_SPEED)}


def run_steps(
    steps: Sequence[Step],
    runner: Runner,
    settings: Settings,
    result_log: ResultLog,
    *,
    budget: float,
    obstacle: str = "",
    resumed: bool = False,
) -> None:
    """Runs steps in order, then what they had no time for.

    Args:
        budget: Seconds of which steps have shares.
        obstacle: Why nothing but the part `environment` can be run; empty where it can.
        resumed: Leave out the items that an earlier run has done.
    """
    late: list[tuple[Step, Part, Sequence[Item]]] = []
    for step in steps:
        if obstacle and step.part != "environment":
            result_log.add(Row(step.part, step.part, step.part, NOT_RUN, note=obstacle))
            continue
        part = load(step.part)
        items = [item for item in part.items(settings) if step.wants(item)]
        items = [item for item in items if not (resumed and result_log.is_done(step.part, item))]
        left = runner.run(step.part, items, side_by_side(part, settings), seconds=step.share * budget)
        late.append((step, part, left))
    for step, part, items in late:
        runner.report_not_run(step.part, runner.run(step.part, items, side_by_side(part, settings)))


def side_by_side(part: Part, settings: Settings) -> int:
    """How many processes share a part's items: as many as it wants, with two processors for each."""
    wanted: int = getattr(part, "SIDE_BY_SIDE", 1)
    return 1 if settings.quick or (os.cpu_count() or 1) < 2 * wanted else wanted


def described() -> str:
    """The presets, for the help of the command line."""
    return "\n".join(f"  {preset.name} ({preset.seconds:.0f} s): {preset.about}" for preset in PRESETS.values())
