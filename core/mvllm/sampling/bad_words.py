"""Bad words as token sequences: the last token of a word is blocked where the sequence ends with the tokens before it.

Words of one token are always blocked. Longer words are indexed by their last token but one, so that a step checks only
those that the newest token can continue.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class BadWords:
    """The bad words of one request.

    Args:
        words: Token ids of each, none empty.
        vocab_size: Words with larger ids are ignored.

    Attributes:
        reads_tokens: Whether the blocked tokens depend on the sequence.
    """

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        known = [word for word in words if max(word) < vocab_size]
        self._always = np.array(sorted({word[0] for word in known if len(word) == 1}), dtype=np.int64)
        self._after: dict[int, list[tuple[np.ndarray, int]]] = {}
        for word in known:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append((np.array(word[:-1], dtype=np.int32), word[-1]))
        self.reads_tokens = bool(self._after)

    def blocked(self, token_ids: np.ndarray) -> np.ndarray:
        """int64 [b]: the tokens blocked at the next position.

        Args:
            token_ids: int32 [n], n >= 1: the whole sequence, prompt included.
        """
        candidates = self._after.get(int(token_ids[-1]))
        if candidates is None:
            return self._always
        last_ids = [
            last
            for before, last in candidates
            if len(before) <= len(token_ids) and (token_ids[-len(before) :] == before).all()
        ]
        return np.concatenate((self._always, np.array(last_ids, dtype=np.int64)))
