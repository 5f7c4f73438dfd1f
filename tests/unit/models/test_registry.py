"""Architectures are found by the names that checkpoints use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mvllm.errors import ModelError
from mvllm.models.causal_lm import CausalLM
from mvllm.models.registry import resolve_model_class, supported_architectures


@pytest.mark.parametrize("architecture", supported_architectures())
def test_every_supported_architecture_has_its_class(architecture: str) -> None:
    model_class = resolve_model_class(architecture)
    assert issubclass(model_class, CausalLM)
    assert model_class.__name__ == architecture


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ModelError, match="'FooForCausalLM' is not supported"):
        resolve_model_class("FooForCausalLM")


def test_reading_the_registry_loads_no_model_and_no_torch() -> None:
    script = (
        "import sys; from mvllm.models.registry import supported_architectures; supported_architectures();"
        "sys.exit('torch' in sys.modules or 'mvllm.models.llama' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
