"""N-gram proposals: the tokens that followed the longest earlier match; classes that are no proposers."""

from __future__ import annotations

import numpy as np
import pytest

from mvllm.config.draft_method import SpeculativeConfig
from mvllm.errors import ConfigError
from mvllm.extension_api import draft_heads
from mvllm.worker.spec_decode.ngram import tokens_after_match
from mvllm.worker.spec_decode.proposer import proposer_class


def propose(*sequences: list[int], num_tokens: int = 3, shortest: int = 2, longest: int = 4) -> list[list[int]]:
    return [tokens_after_match(np.array(tokens), num_tokens, shortest, longest) for tokens in sequences]


def reference_proposal(tokens: list[int], num_tokens: int, shortest: int, longest: int) -> list[int]:
    """A slow reference: the longest suffix first, and of its matches the latest."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for begin in range(len(tokens) - length - 1, -1, -1):
            if tokens[begin : begin + length] == tokens[-length:]:
                known = tokens[begin + length :]
                while len(known) < num_tokens:
                    known = known + known
                return known[:num_tokens]
    return []


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 9, 2, 3], [4, 5, 9]),
        ([1, 2, 3, 4, 5, 9, 8, 3], []),  # a single repeated token is too short
        ([1, 2, 5, 9, 1, 2, 6, 9, 1, 2], [6, 9, 1]),  # the latest match
        ([7, 1, 2, 5, 9, 1, 2, 6, 7, 1, 2], [5, 9, 1]),  # but the longest match has precedence
        ([5, 5, 5], [5, 5, 5]),
        ([3, 4, 3, 4], [3, 4, 3]),  # continues as before
        ([3], []),
        ([3, 3], []),
    ],
)
def test_it_proposes_the_tokens_after_the_last_match(tokens: list[int], expected: list[int]) -> None:
    assert propose(tokens) == [expected]


def test_each_row_gets_its_own_draft_tokens() -> None:
    assert propose([1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 6, 7], num_tokens=1) == [[3], [], [8]]


def test_proposals_equal_a_simple_reference() -> None:
    rng = np.random.default_rng(0)
    for _ in range(600):
        tokens = rng.integers(0, rng.integers(2, 5), size=rng.integers(1, 30)).tolist()
        num_tokens, shortest = (int(rng.integers(1, each)) for each in (9, 4))
        longest = shortest + int(rng.integers(0, 4))
        expected = reference_proposal(tokens, num_tokens, shortest, longest)
        assert propose(tokens, num_tokens=num_tokens, shortest=shortest, longest=longest) == [expected], tokens


def test_a_class_that_is_no_proposer_is_refused_with_the_base_class_to_use() -> None:
    for named, reason in (
        ("collections:OrderedDict", "no subclass of mvllm.extension_api.draft_heads.Proposer"),
        ("collections:Nothing", "no subclass of mvllm.extension_api.draft_heads.Proposer"),
        ("nowhere.at_all:Proposer", "whose module cannot be imported: No module named 'nowhere'"),
        ("", "whose module cannot be imported"),
    ):
        with pytest.raises(ConfigError, match="The method 'mine' of speculative_config names the class") as caught:
            proposer_class(SpeculativeConfig("mine", 2, proposer=named))
        assert repr(named) in str(caught.value) and reason in str(caught.value)
    assert issubclass(draft_heads.HeadProposer, draft_heads.Proposer)
