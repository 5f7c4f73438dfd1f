"""`mvllm list`, `pull`, `rm` and `show` on a hub cache that a test has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mvllm.config.cached_models import list_cached_models
from mvllm.demo import demo_model_path
from mvllm.entrypoints.cli.main import main
from mvllm_tools.list import format_age, format_bytes
from tests.unit.config.test_cached_models import add_two_models, cache  # noqa: F401  (a fixture)


def test_models_are_listed_and_removed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    add_two_models(cache)
    assert main(["list"]) == 0
    assert "org/weights       2.0 kB  gptq          just now" in capsys.readouterr().out
    assert main(["rm", "org/files:Q8_0", "org/weights"]) == 0
    assert "Removed org/weights: 2.0 kB.\n" in capsys.readouterr().out
    assert [model.name for model in list_cached_models()] == ["org/files:Q4_K_M"]
    assert main(["rm", "org/other"]) == 1
    assert "'org/other' is not in the hub's cache" in capsys.readouterr().err


def test_pull_without_a_network_says_why(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(["pull", "org/absent:Q4_K_M"]) == 1
    assert "HF_HUB_OFFLINE=1 forbids asking the hub" in capsys.readouterr().err
    assert main(["pull", "demo"]) == 0


def test_show_prints_facts_about_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "demo"]) == 0
    out = capsys.readouterr().out
    assert "architecture     LlamaForCausalLM\nparameters       2,459,712\n" in out
    assert f"weights          bfloat16\nfolder           {demo_model_path()}\n" in out


def test_show_prints_the_kinds_of_blocks_of_a_quantized_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((demo_model_path() / "config.json").read_bytes())
    kinds = {"model.embed_tokens": "Q8_0", "model.layers.0.mlp.up_proj": "Q4_K", "model.layers.1.mlp.up_proj": "Q4_K"}
    config["quantization_config"] = {"quant_method": "gguf", "tensors": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["show", str(tmp_path)]) == 0
    assert "weights          Q4_K, Q8_0\n" in capsys.readouterr().out


def test_sizes_and_ages_have_units() -> None:
    assert [format_bytes(n) for n in (999, 4_690_000, 4_690_000_000)] == ["999 B", "4.7 MB", "4.7 GB"]
    assert format_age(0.0).endswith("days ago")
