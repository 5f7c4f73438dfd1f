"""Checks of architecture and quantization support, before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.models.checkpoint_support import check_architecture
from mvllm.models.registry import supported_architectures


def config(architecture: str, *, trust_remote_code: bool = False, **keys) -> ModelConfig:
    return ModelConfig(
        model="m",
        path=Path("/m"),
        tokenizer=None,
        hf_config=HFConfig(keys, "/m/config.json"),
        architecture=architecture,
        dtype="auto",
        max_model_len=8,
        vocab_size=8,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        trust_remote_code=trust_remote_code,
    )


@pytest.mark.parametrize("architecture", supported_architectures())
def test_a_known_architecture_uses_the_native_class_despite_code_in_the_folder(architecture):
    check_architecture(config(architecture))
    check_architecture(config(architecture, auto_map={"AutoModelForCausalLM": "modeling.M"}))


def test_an_unknown_architecture_is_refused_with_those_that_are_known():
    with pytest.raises(
        ModelError, match=r"/m/config\.json: the architecture 'Acme' is not supported.*LlamaForCausalLM"
    ):
        check_architecture(config("Acme"))


@pytest.mark.parametrize(("trust", "word"), [(False, "without"), (True, "with")])
def test_a_folders_own_model_code_is_never_run(trust, word):
    with pytest.raises(ModelError, match=rf"auto_map\), which is not run: {word} trust_remote_code"):
        check_architecture(config("Acme", trust_remote_code=trust, auto_map={"AutoModel": "m.M"}))
