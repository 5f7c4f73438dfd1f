"""SuffixIndex: finds where the last tokens of a text stand in other tokens, and what followed them there.

It answers what a suffix tree of bounded depth answers, without its nodes. Each position of the indexed tokens is in
three chains: of the positions that follow the same 8 tokens, the same 4 tokens and the same 2 tokens.

    tokens      a b c d . . a b c e . . a b c d . . a b c
    chain of 2      2               8            14           positions after `b c` ... newest first: 14, 8, 2

A search follows the chain of the longest n-gram that occurred, compares tokens backwards from each of the newest 16
positions to find how many match, and lets these positions vote on each next token, as the counts of tree nodes do.

    memory: 28 bytes a token, in arrays that are allocated once or doubled
    time:   appending a token and searching take the same time in short and long texts
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NGRAMS = (8, 4, 2)
"""Lengths of the n-grams with a chain. A match is at least as long as the last of them."""

MAX_POSITIONS = 16
"""Positions of a chain that a search looks at, newest first."""

MAX_LENGTHS = 4
"""Lengths of matches, longest first, from which a search makes a draft, to take the best of them."""

SEPARATOR = -1
"""Ends an indexed text: it matches nothing and is never proposed."""

_MULTIPLIER = 0x9E3779B1
_MASK = 0xFFFFFFFF
_ONE_BY_ONE = 8
"""So many tokens or positions are handled one by one; more, as arrays."""


@dataclass(frozen=True)
class Continuation:
    """What probably follows a text.

    Attributes:
        token_ids: The most frequent tokens after the match.
        score: Expected number of accepted tokens: the sum of the tokens' probabilities, by the counts.
        match_len: Tokens of the match.
    """

    token_ids: list[int]
    score: float
    match_len: int


NOTHING = Continuation([], 0.0, 0)


@dataclass(frozen=True)
class DraftLimits:
    """How long drafts may be.

    Attributes:
        max_tokens: Most tokens of a draft.
        max_depth: Most tokens of a match that are compared.
        factor: A draft has at most so many tokens for each token of the match.
        min_probability: A draft ends before its probability falls below this.
    """

    max_tokens: int
    max_depth: int
    factor: float
    min_probability: float

    def of_match(self, length: int) -> int:
        """Most tokens of a draft after a match of that length."""
        return min(self.max_tokens, int(self.factor * length))


class SuffixIndex:
    """The newest tokens of one text or of several, and chains through them.

    Args:
        capacity: Most tokens that are kept; older ones are overwritten. Rounded up to a power of two.
        can_copy_itself: The searched text is the indexed one, so a match may reach into the draft.
    """

    def __init__(self, capacity: int, *, can_copy_itself: bool = False) -> None:
        self._capacity = 1 << max(capacity - 1, 1).bit_length()
        self._can_copy_itself = can_copy_itself
        self.num_tokens = 0
        self._first = 0  # older tokens are not searched
        self._allocate(min(self._capacity, 1024))

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return self._tokens.nbytes + sum(each.nbytes for each in (*self._heads, *self._chains))

    def drop_before(self, position: int) -> None:
        """Lets searches find no token before a position."""
        self._first = max(self._first, position)

    def extend(self, token_ids: np.ndarray) -> None:
        """Appends tokens, int [n]. They must not be negative, except for SEPARATOR."""
        token_ids = token_ids[max(0, len(token_ids) - self._capacity) :]
        self._reserve(len(token_ids))
        if len(token_ids) <= _ONE_BY_ONE:
            for token in token_ids.tolist():
                self._append(token)
        else:
            self._extend(token_ids)

    def search(self, text: np.ndarray, limits: DraftLimits) -> Continuation:
        """The best continuation of a text.

        Args:
            text: int32 [n], contiguous: its last tokens, at most `limits.max_depth` are read.
        """
        found = self._matches(text, limits.max_depth)
        best = NOTHING
        positions: list[int] = []
        lengths = sorted(set(found.values()), reverse=True)
        for length in lengths[:MAX_LENGTHS]:
            positions += [position for position, matched in found.items() if matched == length]
            most = limits.of_match(length)
            if most <= best.score:
                break  # shorter matches give shorter drafts
            candidate = self._vote(positions, length, most, limits.min_probability)
            if candidate.score > best.score:
                best = candidate
        return best

    def _allocate(self, size: int) -> None:
        """Makes arrays for `size` tokens, a power of two, empty."""
        self._size = size
        self._tokens = np.full(size, SEPARATOR, dtype=np.int32)
        self._heads = [np.full(size, -1, dtype=np.int32) for _ in NGRAMS]
        self._chains = [np.full(size, -1, dtype=np.int32) for _ in NGRAMS]
        # Single elements of memoryviews are read and written in a third of the time that arrays take.
        self._token_view = self._tokens.data
        self._views = [
            (n, head.data, chain.data) for n, head, chain in zip(NGRAMS, self._heads, self._chains, strict=True)
        ]

    def _reserve(self, more: int) -> None:
        """Makes room for more tokens, by doubling the arrays as long as the capacity allows."""
        if self.num_tokens + more > 2**31 - 1:  # positions are int32: begin again
            self.num_tokens = self._first = 0
            self._allocate(self._size)
        needed = min(self.num_tokens + more, self._capacity)
        if needed <= self._size:
            return
        known = self._tokens[: self.num_tokens].copy()
        self._allocate(1 << (needed - 1).bit_length())
        self.num_tokens = 0
        self._extend(known)

    def _append(self, token: int) -> None:
        """Puts the position of a token into the chains of the n-grams before it, and stores the token."""
        position, tokens, mask = self.num_tokens, self._token_view, self._size - 1
        for n, head, chain in self._views:
            if position < n:
                continue
            value = 0
            for i in range(position - n, position):
                value = (value * _MULTIPLIER + tokens[i & mask] + 1) & _MASK
            slot = _slot(value, mask)
            chain[position & mask] = head[slot]
            head[slot] = position
        tokens[position & mask] = token
        self.num_tokens = position + 1

    def _extend(self, token_ids: np.ndarray) -> None:
        """`_append` for each of many tokens, at most `_size`."""
        begin, end, mask = self.num_tokens, self.num_tokens + len(token_ids), self._size - 1
        before = min(begin, max(NGRAMS))
        past = self._tokens[np.arange(begin - before, begin) & mask]
        text = np.concatenate((past, token_ids)).astype(np.uint64) & np.uint64(_MASK)
        for n, head, chain in zip(NGRAMS, self._heads, self._chains, strict=True):
            first = max(begin, n)
            if first >= end:
                continue
            positions = np.arange(first, end)
            values = np.zeros(len(positions), dtype=np.uint64)
            for i in range(n):
                start = first - n + i - (begin - before)
                values = (values * np.uint64(_MULTIPLIER) + text[start : start + len(positions)] + np.uint64(1)) & (
                    np.uint64(_MASK)
                )
            slots = ((values * np.uint64(_MULTIPLIER)) & np.uint64(_MASK)) >> np.uint64(8) & np.uint64(mask)
            order = np.argsort(slots, kind="stable")
            sorted_slots, sorted_positions = slots[order], positions[order]
            previous = np.empty(len(order), dtype=np.int64)
            previous[1:] = sorted_positions[:-1]
            is_first = np.ones(len(order), dtype=bool)
            is_first[1:] = sorted_slots[1:] != sorted_slots[:-1]
            previous[is_first] = head[sorted_slots[is_first]]
            chain[sorted_positions & mask] = previous
            is_last = np.roll(is_first, -1)
            head[sorted_slots[is_last]] = sorted_positions[is_last]
        self._tokens[np.arange(begin, end) & mask] = token_ids
        self.num_tokens = end

    def _matches(self, text: np.ndarray, max_depth: int) -> dict[int, int]:
        """The newest positions after the longest n-gram of NGRAMS that ends the text and occurs, and how many tokens
        before each match."""
        oldest, length = max(self._first, self.num_tokens - self._size), min(len(text), max_depth)
        last = text[len(text) - length :]
        for i, n in enumerate(NGRAMS):
            if n > length:
                continue
            positions = self._chain(i, last[length - n :].tolist(), oldest)
            compare = self._compare if len(positions) <= _ONE_BY_ONE else self._compare_arrays
            lengths = compare(positions, last, oldest)
            found = {position: matched for position, matched in zip(positions, lengths, strict=True) if matched >= n}
            if found:
                return found
        return {}

    def _chain(self, number: int, ngram: list[int], oldest: int) -> list[int]:
        """The newest positions in the chain of an n-gram. A chain has positions of other n-grams, too."""
        mask, n = self._size - 1, len(ngram)
        _, head, chain = self._views[number]
        value = 0
        for token in ngram:
            value = (value * _MULTIPLIER + token + 1) & _MASK
        position, found = head[_slot(value, mask)], list[int]()
        while position - n >= oldest and len(found) < MAX_POSITIONS:
            found.append(position)
            position = chain[position & mask]
        return found

    def _compare(self, positions: list[int], last: np.ndarray, oldest: int) -> list[int]:
        """How many tokens before each position equal the last ones of a text."""
        tokens, mask, view = self._token_view, self._size - 1, last.data
        found: list[int] = []
        for position in positions:
            most = min(len(view), position - oldest)
            begin, matched = (position - most) & mask, 0
            if begin + most <= self._size and tokens[begin : begin + most] == view[len(view) - most :]:
                matched = most
            while matched < most and tokens[(position - 1 - matched) & mask] == view[-1 - matched]:
                matched += 1
            found.append(matched)
        return found

    def _compare_arrays(self, positions: list[int], last: np.ndarray, oldest: int) -> list[int]:
        """As `_compare`, for many positions."""
        before = np.array(positions)[:, None] - np.arange(1, len(last) + 1)
        equal = (self._tokens[before & (self._size - 1)] == last[::-1]) & (before >= oldest)
        lengths: list[int] = np.logical_and.accumulate(equal, axis=1).sum(axis=1).tolist()
        return lengths

    def _vote(self, positions: list[int], match_len: int, most: int, min_probability: float) -> Continuation:
        """Follows the most frequent next token from all positions at once.

        Args:
            positions: Newest first: of equally frequent tokens the newest is taken.
            most: Most tokens.
        """
        rows = self._following(positions, most)
        if len(rows) == 1 or not (rows[1:] != rows[0]).any():
            draft = _until_separator(rows[0].tolist())
            return Continuation(draft, float(len(draft)), match_len)
        alive: list[list[int]] = rows.tolist()
        draft, probability, score = [], 1.0, 0.0
        for column in range(most):
            if len(alive) == 1:
                rest = _until_separator(alive[0][column:])
                return Continuation(draft + rest, score + probability * len(rest), match_len)
            tokens = [row[column] for row in alive]
            token, count = tokens[0], tokens.count(tokens[0])
            if count < len(tokens):
                counts: dict[int, int] = {}
                for each in tokens:
                    counts[each] = counts.get(each, 0) + 1
                token = max(counts, key=counts.__getitem__)
                probability *= counts[token] / len(tokens)
                alive = [row for row in alive if row[column] == token]
            if token == SEPARATOR or probability < min_probability:
                break
            draft.append(token)
            score += probability
        return Continuation(draft, score, match_len)

    def _following(self, positions: list[int], most: int) -> np.ndarray:
        """int32 [n, most]: the tokens from each position on; behind the end those of the draft, or SEPARATOR."""
        first, steps, mask = np.array(positions), np.arange(most), self._size - 1
        left = self.num_tokens - first
        if int(left.min()) >= most:
            return self._tokens[(first[:, None] + steps) & mask]
        # A draft that begins at a position copies itself from there on: it has a period of `left`.
        offsets = steps % left[:, None]
        found = self._tokens[(first[:, None] + offsets) & mask]
        if not self._can_copy_itself:
            found[steps >= left[:, None]] = SEPARATOR
        return found


def _until_separator(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(SEPARATOR)] if SEPARATOR in token_ids else token_ids


def _slot(value: int, mask: int) -> int:
    """The chain of an n-gram's hash."""
    return (((value * _MULTIPLIER) & _MASK) >> 8) & mask
