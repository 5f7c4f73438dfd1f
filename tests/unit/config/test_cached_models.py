"""The models of a hub cache that a test has written, and their removal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mvllm.config.cached_models import list_cached_models, remove_cached_model
from mvllm.errors import ConfigError, ModelError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MVLLM_CACHE_DIR", str(tmp_path / "derived"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def add_repository(cache: Path, name: str, files: dict[str, bytes]) -> None:
    """A repository as huggingface_hub stores it: contents in blobs, and one revision of links to them."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc123"
    for path in (snapshot, folder / "blobs", folder / "refs"):
        path.mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc123")
    for i, (file, content) in enumerate(files.items()):
        (folder / "blobs" / f"blob{i}").write_bytes(content)
        os.symlink(f"../../blobs/blob{i}", snapshot / file)


def add_two_models(cache: Path) -> None:
    config = json.dumps({"quantization_config": {"quant_method": "gptq"}}).encode()
    add_repository(cache, "org/weights", {"config.json": config, "model.safetensors": b"x" * 2000})
    add_repository(cache, "org/files", {"a-Q4_K_M.gguf": b"y" * 100, "a-Q8_0.gguf": b"z" * 200})


def test_models_of_the_cache_are_listed_by_the_names_that_commands_take(cache: Path) -> None:
    add_two_models(cache)
    found = {model.name: (model.num_bytes, model.quantization) for model in list_cached_models()}
    assert found == {
        "org/weights": (2049, "gptq"),
        "org/files:Q4_K_M": (100, "Q4_K_M"),
        "org/files:Q8_0": (200, "Q8_0"),
    }


def test_one_gguf_file_is_removed_and_the_other_stays(cache: Path) -> None:
    add_two_models(cache)
    for name in ("org/files:Q8_0", "org/weights"):
        remove_cached_model(name)
    assert [model.name for model in list_cached_models()] == ["org/files:Q4_K_M"]
    assert len(list((cache / "models--org--files" / "blobs").iterdir())) == 1
    with pytest.raises((ConfigError, ModelError), match="'org/other' is not in the hub's cache"):
        remove_cached_model("org/other")


def test_a_path_is_not_removed(cache: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ModelError), match="Delete it yourself"):
        remove_cached_model(str(tmp_path))
    assert tmp_path.exists()


def test_a_file_outside_of_the_cache_to_which_a_link_leads_stays(cache: Path, tmp_path: Path) -> None:
    add_two_models(cache)
    outside = tmp_path / "mine.gguf"
    outside.write_bytes(b"m" * 300)
    link = cache / "models--org--files" / "snapshots" / "abc123" / "a-Q8_0.gguf"
    link.unlink()
    link.symlink_to(outside)
    remove_cached_model("org/files:Q8_0")
    assert outside.exists() and not link.is_symlink()
