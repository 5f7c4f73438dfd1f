"""Parsing of PEFT adapter folders, and the errors for unsupported or damaged ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mvllm.errors import ModelError
from mvllm.models.peft_adapter import PeftAdapter, read_peft_adapter

MODULE = "model.layers.0.self_attn.q_proj"


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(pair() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def pair(name: str = MODULE, rank: int = 4) -> dict[str, torch.Tensor]:
    prefix = f"base_model.model.{name}"
    return {f"{prefix}.lora_A.weight": torch.ones(rank, 8), f"{prefix}.lora_B.weight": torch.ones(12, rank)}


def read(folder: Path, max_rank: int = 16) -> PeftAdapter:
    return read_peft_adapter(str(folder), max_rank)


def test_ranks_and_scales_are_those_of_each_module(tmp_path: Path) -> None:
    other = "model.layers.1.self_attn.q_proj"
    tensors = pair() | pair(other, rank=2)
    patterns = {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {f"^{other}$": 1}}
    modules = read(write(tmp_path / "a", tensors, **patterns)).modules
    assert {name: (module.shape, module.scale) for name, module in modules.items()} == {
        MODULE: ((12, 8), 1.5),
        other: ((12, 8), 0.5),
    }
    modules = read(write(tmp_path / "b", tensors, use_rslora=True, **patterns)).modules
    assert modules[MODULE].scale == 3.0 and modules[other].scale == pytest.approx(2**-0.5)
    # A pattern that begins with ^ matches the whole name.
    folder = write(tmp_path / "c", alpha_pattern={"^q_proj": 1, "q_proj": 2})
    assert read(folder).modules[MODULE].scale == 0.5


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "biases of the model"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "trained anew"),
        ({"lora_bias": True}, "biases of the adapter's own"),
        ({"target_parameters": ["x"]}, "no linear layers"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"r": 0}, "r must be an integer"),
        ({"r": 10**9}, "takes ranks up to 16"),
        ({"r": 10**5000}, "takes ranks up to 16"),
        ({"r": True}, "r must be an integer"),
        ({"r": 3}, r"expected \[3, in_features\]"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
        ({"lora_alpha": 1e300}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "no regular expressions"),
        ({"rank_pattern": 3}, "should be an object"),
    ],
)
def test_an_unsupported_configuration_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    if config.get("r") == 10**5000:  # as text: json.dumps has a nesting limit
        folder = write(tmp_path / "a")
        (folder / "adapter_config.json").write_text('{"r": 1' + "0" * 5000 + "}")
        with pytest.raises(ModelError):
            read(folder)
        return
    with pytest.raises(ModelError, match=words):
        read(write(tmp_path / "a", **config))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"base_model.model.lm_head.weight": torch.ones(2, 2)}, "neither lora_A nor lora_B"),
        ({f"base_model.model.{MODULE}.lora_magnitude_vector": torch.ones(2)}, "DoRA"),
        (dict(list(pair().items())[:1]), "there is only lora_A"),
        ({name: tensor.to(torch.int8) for name, tensor in pair().items()}, "is I8"),
        ({name: tensor[None] for name, tensor in pair().items()}, "has shape"),
        ({}, "holds no tensors"),
    ],
)
def test_tensors_that_are_not_adapter_weights_are_refused(
    tensors: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        read(write(tmp_path / "a", tensors))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_only_regular_files_are_read(name: str, tmp_path: Path) -> None:
    """A pipe would block its reader, and a device never ends."""
    for index, make in enumerate((os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path))):
        folder = write(tmp_path / str(index))
        (folder / name).unlink()
        make(folder / name)
        with pytest.raises(ModelError, match=f"has no {name}"):
            read(folder)


def test_files_that_are_missing_or_damaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no adapter folder"):
        read(tmp_path / "nowhere")
    folder = write(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-5])
    with pytest.raises(ModelError, match="cut short"):
        read(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        read(folder)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ModelError, match="safe_serialization=True"):
        read(folder)
    for text, words in (("[]", "JSON object"), ("{", "not valid JSON"), ("[" * 100000, "JSON"), (" " * 2**21, "bytes")):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(ModelError, match=words):
            read(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        read(folder)
