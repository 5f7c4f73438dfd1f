"""Words that must not come, as lists of tokens: the last of one is blocked where the tokens before it stand.

A word of one token is blocked always. The others are filed under their last token but one, so that a step looks only at
those that the newest token may continue.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class BadWords:
    """The words of one request.

    Args:
        words: Token ids of each, none empty.
        vocab_size: Ids from here on do not count.

    Attributes:
        reads_tokens: Whether what is blocked depends on the tokens that are there.
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
        """int64 [b]: the tokens that must not come next.

        Args:
            token_ids: int32 [n], n >= 1: all that the sequence has, prompt included.
        """
        candidates = self._after.get(int(token_ids[-1]))
        if candidates is None:
            return self._always
        ends = [
            last
            for before, last in candidates
            if len(before) <= len(token_ids) and (token_ids[-len(before) :] == before).all()
        ]
        return np.concatenate((self._always, np.array(ends, dtype=np.int64)))
