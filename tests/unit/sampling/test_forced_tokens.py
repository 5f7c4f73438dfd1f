"""Tokens that a request forces at positions of its output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mvllm import RequestError, SamplingParams
from mvllm.messages.sampling_params import validate_for_model
from mvllm.sampling.forced_tokens import ForcedTokens

NOT = -1


def test_tokens_are_forced_at_their_positions_behind_the_prompt() -> None:
    forced = ForcedTokens()
    assert not forced
    forced.set_row(2, {0: 7, 3: 8}, 10)
    assert forced

    def at(*lengths: int) -> list[int] | None:
        found = forced.add_to(None, np.array([1, 2, 3][: len(lengths)]), np.array(lengths))
        return None if found is None else found.tolist()

    assert at(10, 10, 10) == [NOT, 7, NOT]
    assert at(10, 13, 10) == [NOT, 8, NOT]
    assert at(13, 12, 13) is None
    given = np.array([5, 6])
    assert forced.add_to(given, np.array([2, 1]), np.array([10, 10])) is given and given.tolist() == [5, 6]
    forced.clear_row(2)
    assert not forced and at(10, 10) is None


@pytest.mark.parametrize("value", [[1], {-1: 2}, {0: -2}, {0: "a"}, {"a": 1}, dict.fromkeys(range(65537), 1)])
def test_wrong_values_are_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="forced_token_ids must be a dict of at most 65536 positions"):
        SamplingParams(forced_token_ids=value)


def test_forced_tokens_exist_and_exclude_grammars_and_beams() -> None:
    with pytest.raises(RequestError, match="forced_token_ids must be made of token ids from 0 to 9"):
        params = SamplingParams(forced_token_ids={0: 10})
        validate_for_model(params, vocab_size=10, max_model_len=8, max_logprobs=1, prompt_len=1)
    with pytest.raises(RequestError, match="forced_token_ids must be unset with structured_outputs"):
        SamplingParams(forced_token_ids={0: 1}, structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="forced_token_ids must be unset when use_beam_search"):
        SamplingParams(forced_token_ids={0: 1}, use_beam_search=True, n=2)
    assert SamplingParams(forced_token_ids={}).forced_token_ids is None
