"""SuffixIndex finds the matches that a search over all positions finds, in bounded memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mvllm_drafts.suffix_index import MAX_LENGTHS, MAX_POSITIONS, NGRAMS, DraftLimits, SuffixIndex
from mvllm_drafts.suffix_proposer import RecentOutputs

LIMITS = DraftLimits(max_tokens=6, max_depth=12, factor=1.0, min_probability=0.1)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def make_index(tokens: list[int], *, capacity: int = 4096, piece: int | None = None, own: bool = True) -> SuffixIndex:
    index = SuffixIndex(capacity, can_copy_itself=own)
    for begin in range(0, len(tokens), piece or max(1, len(tokens))):
        index.extend(array(tokens[begin : begin + (piece or len(tokens))]))
    return index


def draft(tokens: list[int], limits: DraftLimits = LIMITS, **settings: int) -> list[int]:
    return make_index(tokens, **settings).search(array(tokens), limits).token_ids


def match_len(tokens: list[int], position: int, text: list[int], depth: int) -> int:
    matched = 0
    while matched < min(depth, position, len(text)) and tokens[position - 1 - matched] == text[-1 - matched]:
        matched += 1
    return matched


def reference(tokens: list[int], limits: DraftLimits) -> tuple[list[int], float]:
    """Every position that follows a match votes, for each length of a match; the draft with the best score counts."""
    matches = {position: match_len(tokens, position, tokens, limits.max_depth) for position in range(1, len(tokens))}
    least = max((n for n in NGRAMS if any(length >= n for length in matches.values())), default=None)
    best: tuple[list[int], float] = ([], 0.0)
    if least is None:
        return best
    for length in sorted({each for each in matches.values() if each >= least}, reverse=True)[:MAX_LENGTHS]:
        alive = sorted((p for p, each in matches.items() if each >= length), key=lambda p: (-matches[p], -p))
        found: list[int] = []
        probability = score = 0.0
        probability = 1.0
        while len(found) < limits.of_match(length):
            text = tokens + found
            following = [text[position + len(found)] for position in alive]
            token = Counter(following).most_common(1)[0][0]
            alive, before = [p for p, each in zip(alive, following, strict=True) if each == token], len(alive)
            probability *= len(alive) / before
            if probability < limits.min_probability:
                break
            found.append(token)
            score += probability
        if score > best[1]:
            best = found, score
    return best


def test_the_tokens_after_the_longest_match_are_proposed_and_a_longer_match_allows_more() -> None:
    assert draft([1, 2, 3, 4, 5, 6, 9, 1, 2]) == [3, 4]
    assert draft([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == [4, 5, 6]
    assert draft([1, 2, 3, 4, 5, 6, 9, 1, 2], DraftLimits(6, 12, 2.0, 0.1)) == [3, 4, 5, 6]
    assert draft([1, 2, 3, 4, 5, 6, 9, 8, 2]) == []  # one token is too short a match
    assert draft([3, 7, 3, 7]) == [3, 7]
    assert draft([5] * 9) == [5] * 6  # a match may reach into the draft


def test_frequencies_choose_the_continuation() -> None:
    tokens = [1, 2, 7, 0, 1, 2, 7, 0, 1, 2, 8, 0, 3, 1, 2]
    assert draft(tokens) == [7, 0]  # twice, although 8 came last
    sure = DraftLimits(6, 12, 1.0, 0.9)
    assert draft(tokens, sure) == []


@pytest.mark.parametrize("piece", [None, 1, 3, 40])
def test_drafts_equal_those_of_a_search_over_all_positions(piece: int | None) -> None:
    rng = np.random.default_rng(0)
    checked = 0
    for _ in range(120):
        tokens = rng.integers(0, rng.integers(3, 9), size=rng.integers(2, 70)).tolist()
        limits = DraftLimits(int(rng.integers(1, 9)), int(rng.integers(2, 14)), float(rng.choice([0.5, 1, 2])), 0.2)
        if sum(tokens[p - 2 : p] == tokens[-2:] for p in range(2, len(tokens))) > MAX_POSITIONS:
            continue
        found = make_index(tokens, piece=piece).search(array(tokens), limits)
        expected, score = reference(tokens, limits)
        assert found.score == pytest.approx(score), tokens
        if found.token_ids == expected:
            checked += 1  # equally frequent tokens may be chosen in another order
    assert checked > 90


def test_old_tokens_are_overwritten_and_memory_stays_the_same() -> None:
    rng = np.random.default_rng(1)
    index, tokens = SuffixIndex(2000, can_copy_itself=True), []
    for size in (1, 700, 5, 900, 3000, 1, 1, 2500, 9, 8, 40000, 6):
        new = rng.integers(0, 50, size=size).tolist()
        tokens += new
        index.extend(array(new))
        assert index.num_bytes <= 28 * 2048
        kept = tokens[-2048:]
        for text in (tokens[-20:], kept[300:330], tokens[:40]):
            found = index._matches(array(text), 12)
            assert all(match_len(tokens[-index.num_tokens :], position, text, 12) >= 2 for position in found)
    assert index.num_bytes == 28 * 2048
    assert index._matches(array(tokens[-600:-580]), 12)


def test_a_new_index_is_small() -> None:
    index = SuffixIndex(1 << 20)
    assert index.num_bytes == 28 * 1024
    index.extend(array(list(range(3000))))
    assert index.num_bytes == 28 * 4096
    assert index.search(array([7, 8, 9]), LIMITS).token_ids == [10, 11, 12]


def test_outputs_of_other_requests_end_at_their_last_token_and_the_oldest_are_dropped() -> None:
    outputs = RecentOutputs(max_requests=2, max_tokens=4096)
    outputs.add(array([1, 2, 3, 4]))
    outputs.add(array([5, 6, 7, 8]))
    assert outputs.index.search(array([1, 2, 3]), LIMITS).token_ids == [4]
    assert outputs.index.search(array([3, 4]), LIMITS).token_ids == []  # what follows is another request's
    outputs.add(array([9, 9, 9]))
    assert outputs.index.search(array([1, 2, 3]), LIMITS).token_ids == []
    assert outputs.index.search(array([5, 6]), LIMITS).token_ids == [7, 8]


def test_without_cached_requests_nothing_is_kept() -> None:
    outputs = RecentOutputs(max_requests=0, max_tokens=4096)
    outputs.add(array([1, 2, 3, 4]))
    assert outputs.index.num_tokens == 0


def test_positions_begin_again_before_they_overflow() -> None:
    index = make_index(list(range(100)))
    index.num_tokens += 2**31 - 200
    index.extend(array([1, 2, 3, 4] * 50))
    assert index.num_tokens == 200
    assert index.search(array([1, 2]), LIMITS).token_ids == [3, 4]
