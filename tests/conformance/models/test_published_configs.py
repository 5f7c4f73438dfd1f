"""Configs as they are published, with all their keys and small sizes, give the logits of transformers.

`../published_configs` has one for each kind of published model. The engine reads the file itself. Of a config for text
and images, transformers reads the part of the text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from tests.helpers.model_zoo import VOCAB_SIZE, load_reference, model_of
from tests.helpers.paged_driver import PagedDriver, load_model
from tests.unit.models.test_parity import draw_tokens, reference_logits, run_mixed

CONFIGS = sorted((Path(__file__).parents[1] / "published_configs").glob("*.json"))
MAX_LEN = 128
TOLERANCE = 1e-4
"""Of the logits' standard deviation: multipliers of some families make logits small or large."""


def text_config(published: dict[str, Any]) -> PreTrainedConfig:
    """The config of the language model, as transformers reads it."""
    settings = dict(published.get("text_config", published))
    if "tie_word_embeddings" in published:
        settings["tie_word_embeddings"] = published["tie_word_embeddings"]
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_published_config_gives_the_logits_of_transformers(path: Path, tmp_path: Path) -> None:
    published = json.loads(path.read_text())
    model_of(text_config(published)).save_pretrained(tmp_path)
    as_saved = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(path.read_text())
    driver = PagedDriver(load_model(tmp_path, max_model_len=MAX_LEN, language_model_only="text_config" in published))
    if "text_config" in published:
        (tmp_path / "config.json").write_text(as_saved)
    reference = load_reference(tmp_path)
    assert reference.config.vocab_size == VOCAB_SIZE
    plans = [(draw_tokens(60, seed=1), 50, [17, 33]), (draw_tokens(30, seed=2), 9, [9])]
    for ours, (tokens, _, _) in zip(run_mixed(driver, plans), plans, strict=True):
        wanted = reference_logits(reference, tokens)
        assert wanted.std() > 0
        torch.testing.assert_close(ours, wanted, atol=TOLERANCE * float(wanted.std()), rtol=0)
