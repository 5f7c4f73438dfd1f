"""The loader with the engine's models, on checkpoints that transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mvllm.errors import ModelError
from mvllm.layers.weight_target import WeightTarget
from mvllm.models.checkpoint import read_checkpoint
from mvllm.models.registry import resolve_model_class
from mvllm.models.weight_loader import load_weights
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.paged_driver import make_context, read_config

FAMILIES = ["llama-gqa", "llama-many-files", "mistral-window", "qwen2", "qwen3-head-dim-tied", "opt-projected", "gpt2"]


def build(folder: Path, dtype: torch.dtype = torch.float32):
    config = read_config(folder)
    return resolve_model_class(config.architecture)(config, make_context(dtype=dtype))


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def expected(target: WeightTarget, tensor: torch.Tensor) -> torch.Tensor:
    rectangle = tensor[target.source]
    return (rectangle.T if target.transpose else rectangle).to(target.parameter.dtype)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_of_every_family_is_loaded_into_its_place(tmp_path, name, dtype):
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    model = build(folder, dtype)
    targets = model.weight_targets()
    load_weights(model, folder, use_tqdm=False)
    assert set(targets) <= set(stored)
    for tensor_name, of_name in targets.items():
        for target in of_name:
            assert torch.equal(target.parameter[target.destination], expected(target, stored[tensor_name])), tensor_name


@pytest.mark.parametrize("name", FAMILIES)
def test_dummy_weights_fill_every_family_from_its_config_alone(tmp_path, name):
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model = build(folder)
    load_weights(model, folder, load_format="dummy", use_tqdm=False)
    for parameter_name, parameter in model.named_parameters():
        assert parameter.abs().sum() > 0, parameter_name
        assert (parameter.abs() < 1.05).all(), parameter_name


def test_a_config_for_another_vocabulary_is_detected_by_the_embedding(tmp_path):
    folder = make_checkpoint("llama-gqa", tmp_path, tokenizer=False)
    rows = read_checkpoint(folder)["model.embed_tokens.weight"].shape[0]
    change_config(folder, vocab_size=rows - 1)
    with pytest.raises(ModelError, match=rf"rows for {rows} tokens, but vocab_size in config.json is {rows - 1}"):
        load_weights(build(folder), folder, use_tqdm=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 128}, r"has shape \[320, 64\], expected \[320, 128\]"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight' has shape \[32, 64\], expected \[64, 64\]"),
        ({"num_hidden_layers": 4}, r"missing tensor 'model\.layers\.3\."),
        ({"num_hidden_layers": 2}, r"unknown tensor 'model\.layers\.2\."),
        ({"attention_bias": True}, r"missing tensor 'model\.layers\.0\.self_attn\..*bias'"),
    ],
)
def test_a_config_of_another_model_is_detected_by_the_weights(tmp_path, changes, said):
    folder = make_checkpoint("llama-gqa", tmp_path, tokenizer=False)
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=said):
        load_weights(build(folder), folder, use_tqdm=False)


def test_missing_and_truncated_shards_are_named(tmp_path):
    folder = make_checkpoint("llama-many-files", tmp_path, tokenizer=False)
    shard = sorted(folder.glob("model-0000*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(ModelError, match=rf"{shard.name} is cut short"):
        load_weights(build(folder), folder, use_tqdm=False)
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name}', which is missing"):
        load_weights(build(folder), folder, use_tqdm=False)
