"""How long a step of a replica takes, and how fast it computes prompts and generates tokens.

    seconds of a step = step + sequence * (sequences that generate) + kv_token * (tokens in their KV caches)
                        + prompt_token * (prompt tokens computed in it)

The four numbers are fitted to measured steps (`python -m tests.perf.scaling_simulation --measure FILE`), or assumed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class StepTimes:
    """Step times of one replica, in seconds.

    Attributes:
        step: Of an empty step: reads all weights.
        sequence: More for each sequence that generates a token.
        kv_token: More for each token in the KV caches of these sequences.
        prompt_token: More for each prompt token.
        max_prompt_tokens: Most prompt tokens of one step.
        max_sequences: Most running sequences.
        kv_tokens: Tokens that fit into the KV cache.
        load_token: Seconds to load a token's keys and values from another replica or a host tier.
    """

    step: float
    sequence: float
    kv_token: float
    prompt_token: float
    max_prompt_tokens: int = 2048
    max_sequences: int = 256
    kv_tokens: int = 400_000
    load_token: float = 128 * 1024 / 20e9

    def decode_step(self, num_sequences: int, num_kv_tokens: float) -> float:
        """Seconds of a step without prompt tokens."""
        return self.step + self.sequence * num_sequences + self.kv_token * num_kv_tokens


ACCELERATOR = StepTimes(step=6.0e-3, sequence=3.5e-5, kv_token=4.5e-8, prompt_token=3.6e-5)
"""Assumed, not measured: 8 billion parameters in 16 bits on a device that reads 3.35 TB/s and computes 450 TFLOP/s of
a matrix product (half of its peak). 16 GB of weights take 4.8 ms and the engine 1.2 ms; 16 GFLOP per token 36 us; 128
KiB of keys and values per token 39 ns at full bandwidth. The terms add up, although a device overlaps some of them."""


def fit(rows: Sequence[Sequence[float]]) -> StepTimes:
    """Fits step times to measured steps by least squares of the relative errors, with no number below 0.

    Args:
        rows: (sequences that generate, tokens in their KV caches, prompt tokens, seconds) of each step.
    """
    data = np.asarray(rows, dtype=np.float64)
    matrix = np.column_stack([np.ones(len(data)), data[:, :3]]) / data[:, 3:]
    active = list(range(4))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, active], np.ones(len(data)), rcond=None)
        if (found >= 0).all():
            break
        active.pop(int(np.argmin(found)))
    values = np.zeros(4)
    values[active] = found
    return StepTimes(*map(float, values))


def read(path: Path) -> StepTimes:
    """Step times from a file that `--measure` has written."""
    return fit(json.loads(path.read_text())["steps"])
