"""Families of models whose config.json another package reads."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from mvllm.config.model_builder import build_model_config
from mvllm.config.model_families import ModelFamily
from mvllm.config.token_spaces import TokenSpace
from mvllm.errors import ModelError
from tests.helpers.plugins import prepend, write_metadata
from tests.unit.config.folders import LLAMA, write_folder


def drop_table(config: dict[str, object], source: str) -> None:
    config["table"] = len(str(config["table"]))


FAMILY = ModelFamily(
    "AcmeForCausalLM",
    simplify=drop_table,
    text_defaults=lambda outer, text: {"max_position_embeddings": 77},
    token_spaces=lambda hf_config, size, generation: {"sound": TokenSpace("sound", first=size, size=9)},
)
TEXT = {key: value for key, value in LLAMA.items() if key not in ("max_position_embeddings", "architectures")}


def test_a_package_reads_the_config_of_its_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = f"[mvllm.model_families]\nacme = {__name__}:FAMILY\nbroken = {__name__}:TEXT\n"
    prepend(monkeypatch, [str(write_metadata(tmp_path / "site", "acme", group))])
    folder = tmp_path / "model"
    write_folder(
        folder, {"model_type": "acme", "architectures": ["AcmeForCausalLM"], "table": "x" * 99, "text_config": TEXT}
    )
    config = build_model_config(model="m", folder=folder, tokenizer=None)
    assert (config.max_model_len, config.hf_config.get("table")) == (77, 99)
    assert config.num_token_ids == config.vocab_size + 9
    write_folder(folder, {"model_type": "broken", "architectures": ["AcmeForCausalLM"], "text_config": TEXT})
    with pytest.raises(ModelError, match=r"must name a ModelFamily of mvllm\.extension_api"):
        build_model_config(model="m", folder=folder, tokenizer=None)


def test_a_family_of_a_missing_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    write_folder(tmp_path, {**LLAMA, "model_type": "janus"})
    with pytest.raises(ModelError, match="type 'janus' needs the package mvllm-image-generation"):
        build_model_config(model="m", folder=tmp_path, tokenizer=None)
