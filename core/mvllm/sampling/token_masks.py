"""Token masks from the host: a bit per token, for some rows of a batch.

They go to the device with the other numbers of the step, as float32 (see BatchUpload), in words of 16 bits: float32
represents these exactly, and they take an eighth of one float per token.

    token        0 1 2 ... 15 | 16 ...
    word         0            | 1             bit t % 16 of word t // 16
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_WORD_BITS = 16


def mask_from_token_ids(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """uint16 [w]: the mask that allows these tokens; ids outside of the vocabulary are ignored."""
    bits = np.zeros(-(-vocab_size // _WORD_BITS) * _WORD_BITS, dtype=np.uint8)
    ids = np.array(token_ids, dtype=np.int64)
    bits[ids[ids < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view("<u2")


def intersect_masks(one: np.ndarray | None, other: np.ndarray | None, num_words: int) -> np.ndarray:
    """uint16 [num_words]:

    the tokens that both masks allow. At most one mask is None; tokens beyond a mask's words are blocked.
    """
    words = np.zeros(num_words, dtype=np.uint16)
    if one is None or other is None:
        only = one if other is None else other
        assert only is not None
        words[: len(only)] = only
    else:
        size = min(len(one), len(other))
        np.bitwise_and(one[:size], other[:size], out=words[:size])
    return words


class TokenMasks:
    """The grammar masks of a step.

    Args:
        rows: Rows that have masks. A row with draft tokens is repeated, see `SchedulerOutput.mask_rows`.
        masks: Their masks one after the other, as in `SchedulerOutput.token_masks`.
    """

    def __init__(self, rows: Sequence[int], masks: bytes) -> None:
        self._rows = np.array(rows, dtype=np.int64)
        self._words = np.frombuffer(masks, dtype="<u2").reshape(len(self._rows), -1)
        self._order = np.argsort(self._rows, kind="stable")

    def covers(self, rows: np.ndarray) -> np.ndarray:
        """bool [n]: which of `rows` have a mask."""
        return np.isin(rows, self._rows)

    def words(self, rows: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
        """uint16 [m, w]: the masks of `rows`, int [m], all of which have one.

        Args:
            num_drafts: int [m]: draft tokens before each sampled token.
        """
        return self._words[self._order[np.searchsorted(self._rows, rows, sorter=self._order) + num_drafts]]

    def fill_bytes(self, out: np.ndarray, rows: np.ndarray, num_drafts: np.ndarray) -> None:
        """Writes the masks of all rows of a batch; rows without a mask get one that allows every token.

        Args:
            out: uint8 [n or more, bytes]: token t of the vocabulary is bit t % 8 of byte t // 8.
            rows: int [n]: the batch row of each row of logits.
            num_drafts: int [n]: as in `words`.
        """
        out[:] = 255
        covered = self.covers(rows).nonzero()[0]
        masks = self.words(rows[covered], num_drafts[covered]).view(np.uint8)
        width = min(masks.shape[1], out.shape[1])
        out[covered, :width] = masks[:, :width]
        out[covered, width:] = 0


def unpack_bytes(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Unpacks masks on the device, with work that depends on shapes alone.

    Args:
        masks: uint8 [n, at least vocab_size / 8].

    Returns:
        bool [n, vocab_size].
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    bits = (masks.unsqueeze(2) >> shifts) & 1
    return bits.view(torch.bool).flatten(1)[:, :vocab_size]


def unpack_masks(words: torch.Tensor, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Unpacks masks on the device.

    Args:
        words: float32 [num_rows * w], integers below 2**16.

    Returns:
        bool [num_rows, vocab_size]; tokens beyond the words are blocked.
    """
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=words.device)
    bits = (words.view(num_rows, -1, 1).int() >> shifts) & 1
    flat = bits.view(num_rows, -1).bool()
    missing = vocab_size - flat.shape[1]
    return torch.nn.functional.pad(flat, (0, missing)) if missing > 0 else flat[:, :vocab_size]
