"""`mvllm list`, `pull` and `rm` on a hub cache that a test has written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mvllm.config.cached_models import list_cached_models
from mvllm.entrypoints.cli.list import format_age, format_bytes
from mvllm.entrypoints.cli.main import main


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


def test_models_of_the_cache_are_listed_by_the_names_that_commands_take(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_two_models(cache)
    found = {model.name: (model.num_bytes, model.quantization) for model in list_cached_models()}
    assert found == {
        "org/weights": (2049, "gptq"),
        "org/files:Q4_K_M": (100, "Q4_K_M"),
        "org/files:Q8_0": (200, "Q8_0"),
    }
    assert main(["list"]) == 0
    assert "org/weights       2.0 kB  gptq          just now" in capsys.readouterr().out


def test_one_gguf_file_is_removed_and_the_other_stays(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_two_models(cache)
    assert main(["rm", "org/files:Q8_0", "org/weights"]) == 0
    assert [model.name for model in list_cached_models()] == ["org/files:Q4_K_M"]
    assert len(list((cache / "models--org--files" / "blobs").iterdir())) == 1
    assert main(["rm", "org/other"]) == 1
    assert "'org/other' is not in the hub's cache" in capsys.readouterr().err


def test_a_path_is_not_removed(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", str(tmp_path)]) == 1
    assert tmp_path.exists() and "Delete it yourself" in capsys.readouterr().err


def test_a_file_outside_of_the_cache_to_which_a_link_leads_stays(cache: Path, tmp_path: Path) -> None:
    add_two_models(cache)
    outside = tmp_path / "mine.gguf"
    outside.write_bytes(b"m" * 300)
    link = cache / "models--org--files" / "snapshots" / "abc123" / "a-Q8_0.gguf"
    link.unlink()
    link.symlink_to(outside)
    assert main(["rm", "org/files:Q8_0"]) == 0
    assert outside.exists() and not link.is_symlink()


def test_pull_without_a_network_says_why(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "org/absent:Q4_K_M"]) == 1
    assert "HF_HUB_OFFLINE=1 forbids asking the hub" in capsys.readouterr().err
    assert main(["pull", "demo"]) == 0


def test_show_prints_facts_about_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "demo"]) == 0
    assert "architecture     LlamaForCausalLM\n" in capsys.readouterr().out


def test_sizes_and_ages_have_units() -> None:
    assert [format_bytes(n) for n in (999, 4_690_000, 4_690_000_000)] == ["999 B", "4.7 MB", "4.7 GB"]
    assert format_age(0.0).endswith("days ago")
