"""The workloads of every engine: greedy, end of text ignored, random token ids, new ones in each run.

offline   many requests at once: throughput
single    one request: what a token costs
prefill   one long prompt: what a prompt costs
prefix    a prompt that many requests begin with: what a cache of prefixes is worth
mixed     requests of many lengths that arrive one by one through an HTTP server, see `mixed.py`
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Requests of one shape, handed over together.

    Attributes:
        name: On the command line and in the table.
        requests: How many.
        shared: Tokens that all prompts begin with.
        own: Further tokens of each prompt.
        output: Tokens to generate for each.
    """

    name: str
    requests: int
    shared: int
    own: int
    output: int

    @property
    def prompt(self) -> int:
        """Tokens of each prompt."""
        return self.shared + self.own

    def __str__(self) -> str:
        shared = f"{self.shared} shared + " if self.shared else ""
        return f"{self.name}: {self.requests} x ({shared}{self.own} in, {self.output} out)"


WORKLOADS = {
    each.name: each
    for each in (
        Workload("offline", requests=32, shared=0, own=256, output=64),
        Workload("single", requests=1, shared=0, own=32, output=128),
        Workload("prefill", requests=1, shared=0, own=2048, output=1),
        Workload("prefix", requests=16, shared=1024, own=16, output=16),
    )
}
MIXED = "mixed"
WARM_UP = -1  # the number of the run that warms up

FIRST_ID = 16  # smaller ids may be special


def prompts_of(workload: Workload, run: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of one run: the same for every engine, and no two runs alike, so that no cache has seen them."""
    rng = random.Random(f"{seed} {workload.name} {run}")
    shared = _ids(rng, workload.shared, vocab_size)
    return [shared + _ids(rng, workload.own, vocab_size) for _ in range(workload.requests)]


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(FIRST_ID, vocab_size) for _ in range(count)]


def in_turn(engines: Sequence[str], runs: int) -> list[tuple[int, str]]:
    """(run, engine) in the order of measuring: each engine once in every round, and each round begins with another.

    What drifts with time, or follows from who ran just before, then falls on all alike.
    """
    order = []
    for run in range(runs):
        start = run % len(engines) if engines else 0
        order += [(run, engine) for engine in (*engines[start:], *engines[:start])]
    return order
