"""What would keep a model's processor from being loaded is known when the engine starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import ModelError
from mvllm.multimodal import installed_packages, processor_loading
from mvllm.multimodal.early_checks import processor_problems


def test_files_and_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = SimpleNamespace(path=tmp_path, multimodal=MultiModalModel(placeholders={"image": 4}))
    [problem] = processor_problems(model)
    assert "has no preprocessor_config.json nor processor_config.json" in problem
    (tmp_path / "processor_config.json").write_text("{}")
    assert processor_problems(model) == []
    (tmp_path / "preprocessor_config.json").write_text('{"size": ')
    [problem] = processor_problems(model)
    assert "preprocessor_config.json is not a JSON object" in problem
    (tmp_path / "preprocessor_config.json").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [problem] = processor_problems(model)
    assert "(PIL). Run: " in problem and "pip install 'av" in problem and "'pillow" in problem
    model.multimodal = None
    assert processor_problems(model) == []


def test_without_pillow_the_error_names_it_and_no_library_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise ValueError("Could not load any image processor class. Missing: torchvision, Pillow")

    monkeypatch.setattr(processor_loading, "_substitute", load)
    monkeypatch.setattr(installed_packages, "is_installed", lambda package: package != "PIL")
    with pytest.raises(ModelError, match=r"^Images in prompts need the package Pillow, .* Run: .*'pillow") as caught:
        processor_loading.load_processor(tmp_path)
    assert "torchvision" not in str(caught.value)
