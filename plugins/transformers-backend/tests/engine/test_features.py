"""Features of the engine that change weights or heads, with models that run through transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_embeddings import check_headless
from tests.engine.test_weight_updates import Pair, expected, result_of
from tests.helpers.parity import engine

SETTINGS: dict[str, object] = {"model_impl": "transformers"}


def test_a_checkpoint_without_head_makes_embeddings_and_says_why_it_generates_nothing(tmp_path: Path) -> None:
    check_headless(SETTINGS, tmp_path)


@pytest.mark.exhaustive
def test_new_weights_are_used_as_by_a_new_engine(tmp_path: Path) -> None:
    pair = Pair("llama-gqa", tmp_path)
    with engine(pair.old, **SETTINGS) as llm:
        llm.update_weights(path=pair.new)
        assert result_of(llm) == expected(pair.new, tuple(SETTINGS.items()))
