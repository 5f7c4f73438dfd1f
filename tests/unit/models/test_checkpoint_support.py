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


def test_an_unknown_architecture_is_refused_with_a_few_of_similar_names():
    with pytest.raises(ModelError, match=r"/m/config\.json: the architecture 'LamaForCausalLM' is not supp") as refused:
        check_architecture(config("LamaForCausalLM"))
    assert "similar names: LlamaForCausalLM, Llama4ForCausalLM. The page docs/reference/models.md" in str(refused.value)
    with pytest.raises(ModelError, match=r"'Acme' is not supported\.") as refused:
        check_architecture(config("Acme"))
    assert "ForCausalLM" not in str(refused.value)


@pytest.mark.parametrize("trust", [False, True])
def test_a_folders_own_model_code_is_never_run(trust):
    with pytest.raises(ModelError, match=r"\(auto_map\) is never run, with or without trust_remote_code"):
        check_architecture(config("Acme", trust_remote_code=trust, auto_map={"AutoModel": "m.M"}))


def test_encoders_with_decoders_are_refused_as_such():
    with pytest.raises(ModelError, match="an encoder with a decoder that attends to it"):
        check_architecture(config("T5ForConditionalGeneration", is_encoder_decoder=True))
