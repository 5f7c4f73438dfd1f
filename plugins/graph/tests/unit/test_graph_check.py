"""`mvllm ops --graph --model`: which operations of a model a compiler lacks, from the model's configuration alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plugins.graph.tests.interpreter_platform import graph_platform_path

from mvllm.entrypoints.cli.main import main
from mvllm_graph.interpreter import Interpreter
from mvllm_graph.operations import GRAPH_OPERATIONS
from tests.helpers import multimodal_zoo
from tests.helpers.model_zoo import ZOO, make_checkpoint
from tests.helpers.plugins import prepend


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose weights are gone."""
    prepend(monkeypatch, graph_platform_path(tmp_path / "plugin"))
    folder = make_checkpoint("llama-gqa", tmp_path / "llama", tokenizer=False)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


def check(*models: Path) -> int:
    options = [option for model in models for option in ("--model", str(model))]
    return main(["ops", "--graph", "--platform", "graph-interpreter", *options])


def test_the_operations_of_a_model_are_counted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(model) == 0
    printed = capsys.readouterr().out
    assert "yes  paged_attention" in printed and "3 nodes" in printed
    assert printed.endswith("The compiler can run it.\n")


def test_what_the_compiler_lacks_is_named(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = Interpreter().operations()
    monkeypatch.setattr(Interpreter, "operations", lambda self: set(every) - {"slice"})
    assert check(model) == 1
    printed = capsys.readouterr().out
    assert "no   slice" in printed
    assert "does not translate the operation 'slice'" in printed and "The compiler cannot run it." in printed


def test_a_model_needs_a_platform(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--graph", "--model", str(model)]) != 0
    assert "give --platform as well" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["llama-gqa", "qwen2moe", "gemma2"])
def test_operations_that_are_traced_when_left_out_are_not_missing(
    family: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are operations of models (rms_norm), others torch operations of a layer (silu, tanh)."""
    traced = {op.name for op in GRAPH_OPERATIONS.values() if op.if_left_out == "traced"}
    every = Interpreter().operations()
    monkeypatch.setattr(Interpreter, "operations", lambda self: set(every) - traced)
    folder = make_checkpoint(next(name for name in ZOO if name.startswith(family)), tmp_path / family, tokenizer=False)
    assert check(folder) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.endswith("The compiler can run it.\n")


@pytest.mark.parametrize(("family", "feature"), [("llama4", "chunked attention"), ("dsa", "sparse attention")])
def test_max_model_len_makes_room_for_models_with_limits(
    family: str, feature: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(next(name for name in ZOO if name.startswith(family)), tmp_path / family, tokenizer=False)
    assert check(folder) == 1
    printed = capsys.readouterr().out
    assert feature in printed
    longest = re.search(r"Set max_model_len to at most (\d+)\.", printed)
    assert longest is not None
    options = ["--model", str(folder), "--max-model-len", longest[1]]
    assert main(["ops", "--graph", "--platform", "graph-interpreter", *options]) == 0


def test_max_model_len_needs_a_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--graph", "--max-model-len", "32"]) != 0
    assert "give --model as well" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_models_of_all_families_are_traced_without_weights(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    firsts = {name.partition("-")[0]: name for name in sorted(ZOO, reverse=True)}
    folders = [make_checkpoint(name, tmp_path / name, tokenizer=False) for name in firsts.values()]
    for name, entry in multimodal_zoo.zoo().items():
        if (family := name.partition("-")[0]) == name or family.startswith("gemma"):
            firsts[name] = name
            folders.append(tmp_path / name)
            multimodal_zoo.save_model(entry.config(), folders[-1], entry.seed, entry.embedding_scale)
    check(*folders)
    printed = capsys.readouterr().out
    reports = dict(zip(firsts, printed.split(str(tmp_path))[1:], strict=True))
    refused = [name for name, text in reports.items() if "The compiler can run it." not in text]
    assert set(refused) <= {"llama4", "dsa", "glm5"}, "\n".join(reports[name] for name in refused)
