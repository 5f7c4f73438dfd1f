"""`load_format="dummy"` runs an engine from a folder that has a config and no weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mvllm import ModelError, SamplingParams
from tests.engine.conftest import MakeLLM

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def without_weights(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors*")))


def test_it_generates_tokens_that_depend_on_the_seed(make_llm: MakeLLM, without_weights: Path) -> None:
    def tokens(seed: int) -> list[int]:
        llm = make_llm(model=without_weights, load_format="dummy", seed=seed)
        return list(llm.generate({"prompt_token_ids": [5, 6, 7]}, PARAMS, use_tqdm=False)[0].outputs[0].token_ids)

    first = tokens(1)
    assert len(first) == 8
    assert tokens(1) == first
    assert tokens(2) != first


def test_without_load_format_dummy_the_error_names_the_missing_weights_and_the_option(
    make_llm: MakeLLM, without_weights: Path
) -> None:
    with pytest.raises(ModelError, match=r"bare.*model\.safetensors.*dummy"):
        make_llm(model=without_weights)
