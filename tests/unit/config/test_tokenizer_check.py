"""The check of the tokenizer's vocabulary against the model's."""

from __future__ import annotations

import pytest

from mvllm.config.tokenizer_check import check_tokenizer
from mvllm.errors import ModelError


def test_a_tokenizer_may_have_as_many_tokens_as_the_model_or_fewer():
    check_tokenizer(100, 100)
    check_tokenizer(100, 90)


def test_a_tokenizer_with_more_tokens_is_refused_with_both_numbers():
    with pytest.raises(ModelError, match=r"/folder has 101 tokens.*only 100"):
        check_tokenizer(100, 101, tokenizer="/folder")
