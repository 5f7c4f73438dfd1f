"""The workloads of every engine: greedy, end of text ignored, random token ids, new ones in each run.

offline   many requests at once: throughput
single    one request: time per token
prefill   one long prompt: time per prompt
prefix    many requests with a common prefix: gain of prefix caching
mixed     requests of many lengths that arrive one by one through an HTTP server, see `mixed.py`
start     a new process to its first token, of GGUF files only, see `gguf_rows.py`
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Requests of the same lengths, submitted together.

    Attributes:
        name: On the command line and in the table.
        requests: Number of requests.
        shared: Tokens of the prefix that all prompts share.
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
START = "start"  # of GGUF files, see `gguf_rows.py`
WARM_UP = -1  # number of the warm-up run

FIRST_ID = 16  # smaller ids may be special


def prompts_of(workload: Workload, run: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of one run: the same for every engine, different in every run, so that no prefix cache contains them."""
    rng = random.Random(f"{seed} {workload.name} {run}")
    shared = _ids(rng, workload.shared, vocab_size)
    return [shared + _ids(rng, workload.own, vocab_size) for _ in range(workload.requests)]


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(FIRST_ID, vocab_size) for _ in range(count)]


def in_turn(engines: Sequence[str], runs: int) -> list[tuple[int, str]]:
    """(run, engine) in measuring order: each engine once per round, and each round begins with another engine.

    Slow changes of the machine, and effects of the previous engine, then affect all engines alike.
    """
    order = []
    for run in range(runs):
        start = run % len(engines) if engines else 0
        order += [(run, engine) for engine in (*engines[start:], *engines[:start])]
    return order
