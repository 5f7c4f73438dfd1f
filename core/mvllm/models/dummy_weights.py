"""Random weights (`load_format='dummy'`), to run a model's shape without its checkpoint.

Values depend on the seed, the tensor's name and the position in the whole checkpoint tensor, so that the model does not
depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np

_BLOCK_ELEMENTS = 1 << 20
# As wide as the normal initialisation with standard deviation 0.02 that most families use.
_HALF_WIDTH = 0.02 * math.sqrt(3)


class DummyTensors:
    """A checkpoint of random values.

    Args:
        seed: Seed of the values.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def rows(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Rows `start` to `stop` of a tensor, in pieces.

        Yields:
            The first row of the piece, and its values as float32 [rows, *shape[1:]].
        """
        row_elements = math.prod(shape[1:])
        block_rows = max(1, _BLOCK_ELEMENTS // max(1, row_elements))
        for block in range(start // block_rows, -(-stop // block_rows)):
            first = block * block_rows
            last = min(first + block_rows, shape[0])
            values = self._block(name, block, (last - first, *shape[1:]))
            lower, upper = max(first, start), min(last, stop)
            yield lower, values[lower - first : upper - first]

    def _block(self, name: str, block: int, shape: tuple[int, ...]) -> np.ndarray:
        digest = hashlib.sha256(f"{self._seed}/{block}/{name}".encode()).digest()
        random = np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "little")))
        values = random.random(shape, dtype=np.float32)
        values -= 0.5
        values *= 2 * _HALF_WIDTH
        if len(shape) == 1 and name.endswith(".weight"):
            values += 1.0  # the weight of a norm: small values would make every layer's output vanish
        return values
