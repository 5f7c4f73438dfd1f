"""Text offsets of tokens."""

from __future__ import annotations

import pytest

from mvllm.entrypoints.openai.common.logprobs import CompletionLogprobs, TokenFormatter
from tests.unit.entrypoints.builders import TOKENIZER

TEXT = "The cat \U0001fae8 sat 𝄞𝄞 on ﷽ the mat."  # with characters that are split over tokens


@pytest.mark.parametrize("piece", [1, 2, 1000])
def test_offsets_are_correct_after_a_character_that_is_split_over_tokens(piece: int) -> None:
    ids = TOKENIZER.encode(TEXT, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == TEXT
    names = TokenFormatter(TOKENIZER, as_ids=False, skip_special=True)
    lists = CompletionLogprobs(names, 0)
    offsets, tokens = [], []
    for i in range(0, len(ids), piece):
        part = lists.format_next(ids[i : i + piece], [None] * len(ids[i : i + piece]))
        offsets += part["text_offset"]
        tokens += part["tokens"]
    split = [token for token in tokens if "\ufffd" in token]
    assert len(split) > 8
    for offset, token in zip(offsets, tokens, strict=True):
        if token not in split:
            assert TEXT[offset:].startswith(token)
    assert offsets == sorted(offsets) and offsets[-1] < len(TEXT)
