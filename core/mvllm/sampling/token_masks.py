"""Which tokens some rows of a batch may choose: a bit for each, from the host.

They go to the device with the step's other numbers, as float32 (see BatchUpload), in words of 16 bits: float32 holds
these exactly, and they are an eighth of what a float for each token would take.

    token        0 1 2 ... 15 | 16 ...
    word         0            | 1             bit t % 16 of word t // 16
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_WORD_BITS = 16


def mask_from_token_ids(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """uint16 [w]: the mask that allows these tokens, as far as there are such."""
    bits = np.zeros(-(-vocab_size // _WORD_BITS) * _WORD_BITS, dtype=np.uint8)
    ids = np.array(token_ids, dtype=np.int64)
    bits[ids[ids < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view("<u2")


def intersect_masks(one: np.ndarray | None, other: np.ndarray | None, num_words: int) -> np.ndarray:
    """uint16 [num_words]: what two masks allow, at least one of which there is; no token beyond their words."""
    words = np.zeros(num_words, dtype=np.uint16)
    if one is None or other is None:
        there = one if other is None else other
        assert there is not None
        words[: len(there)] = there
    else:
        size = min(len(one), len(other))
        np.bitwise_and(one[:size], other[:size], out=words[:size])
    return words


class TokenMasks:
    """The masks of a step.

    Args:
        rows: Rows that have one.
        masks: Theirs, one after the other, as in `SchedulerOutput.token_masks`.
    """

    def __init__(self, rows: Sequence[int], masks: bytes) -> None:
        self._rows = np.array(rows, dtype=np.int64)
        self._words = np.frombuffer(masks, dtype="<u2").reshape(len(self._rows), -1)
        self._order = np.argsort(self._rows)

    def covers(self, rows: np.ndarray) -> np.ndarray:
        """bool [n]: which of `rows` have a mask."""
        return np.isin(rows, self._rows)

    def words(self, rows: np.ndarray) -> np.ndarray:
        """uint16 [m * w]: the masks of `rows`, int [m], which all have one."""
        at = self._order[np.searchsorted(self._rows, rows, sorter=self._order)]
        return self._words[at].reshape(-1)

    @property
    def num_words(self) -> int:
        """Words in each of them."""
        return self._words.shape[1]

    def get(self, row: int) -> np.ndarray | None:
        """uint16 [w]: the mask of a row that may have none."""
        at = np.flatnonzero(self._rows == row)
        return self._words[at[0]] if len(at) else None


def unpack_masks(words: torch.Tensor, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Unpacks masks on the device.

    Args:
        words: float32 [num_rows * w], whole numbers below 2**16.

    Returns:
        bool [num_rows, vocab_size]; tokens beyond the words are not allowed.
    """
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=words.device)
    bits = (words.view(num_rows, -1, 1).int() >> shifts) & 1
    flat = bits.view(num_rows, -1).bool()
    missing = vocab_size - flat.shape[1]
    return torch.nn.functional.pad(flat, (0, missing)) if missing > 0 else flat[:, :vocab_size]
