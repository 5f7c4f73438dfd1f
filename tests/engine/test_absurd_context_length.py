"""A context length that no device holds is refused before rotary tables are allocated for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mvllm.errors import CacheError
from mvllm.layers.rotary import RotaryEmbedding
from tests.helpers import parity
from tests.helpers.model_zoo import make_checkpoint


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_an_absurd_context_length_is_refused_before_tables_are_allocated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    build, built = RotaryEmbedding._build_table, []

    def build_and_record(self: RotaryEmbedding, *args: torch.Tensor | None) -> torch.Tensor:
        built.append(self.max_len)
        return build(self, *args)

    monkeypatch.setattr(RotaryEmbedding, "_build_table", build_and_record)
    absurd = {"max_position_embeddings": 2**40}
    expected = r"1,099,511,627,776 needs at least .* of rotary tables .* Set max_model_len"
    with (
        pytest.raises(CacheError, match=expected),
        parity.engine(folder, skip_tokenizer_init=True, hf_overrides=absurd, max_model_len=None),
    ):
        pass
    assert built == []
    with parity.engine(folder, skip_tokenizer_init=True, hf_overrides=absurd, max_model_len=64):
        assert built == [64]


def test_a_draft_model_has_no_more_positions_than_the_target(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path, tokenizer=False)
    draft = {"model": str(folder), "num_speculative_tokens": 2}
    with parity.engine(folder, skip_tokenizer_init=True, max_model_len=64, speculative_config=draft) as llm:
        speculative = llm.llm_engine.config.speculative
        assert speculative is not None and speculative.model is not None and speculative.model.max_model_len == 64
