"""The models that the benchmark creates if they are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from tests.perf.cpu_bench import models
from tests.perf.cpu_bench.engines import our_engines
from tests.perf.cpu_bench.limits import ModelSize

TINY = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """A folder of models with a tiny shape."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.SHAPES, "tiny", TINY)
        yield tmp_path_factory.mktemp("models")


def test_a_model_is_made_once_and_is_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    made = models.hf_model(folder, "tiny")
    tensors = load_file(made / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert ModelSize.of(made).vocab == 300
    assert sorted(path.name for path in made.parent.iterdir()) == ["tiny"], "no draft stays behind"
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert models.hf_model(folder, "tiny") == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    again = load_file(models.hf_model(tmp_path, "tiny") / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_its_tokenizer_has_a_token_for_every_id(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.hf_model(folder, "tiny"))
    assert len(tokenizer) == 300
    assert tokenizer.decode(tokenizer.encode("any text", add_special_tokens=False)) == "any text"


def test_the_int8_copy_is_rounded_to_nearest_per_output_row(folder: Path) -> None:
    source = load_file(models.hf_model(folder, "tiny") / "model.safetensors")
    made = models.w8a8_model(folder, "tiny")
    tensors = load_file(made / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    assert tensors[name].dtype == torch.int8
    error = (tensors[name].float() * tensors[name + "_scale"] - source[name].float()).abs()
    assert bool((error <= tensors[name + "_scale"] / 2 + 1e-6).all())
    assert int(tensors[name].abs().amax(dim=1).min()) == 127
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    found = json.loads((made / "config.json").read_text())["quantization_config"]
    assert (found["quant_method"], found["ignore"]) == ("compressed-tensors", ["lm_head"])


def test_a_converter_that_fails_leaves_no_file_behind(folder: Path) -> None:
    engine = replace(our_engines(1)[0], model="gguf-q4_0", python=Path(sys.executable))
    with pytest.raises(subprocess.CalledProcessError) as failed:  # the package is not installed in this Python
        models.model_for(engine, folder, "tiny")
    assert "llama_cpp" in failed.value.stdout
    assert [path.name for path in (folder / "gguf").iterdir()] == ["tiny-bf16.gguf"]  # what the quantizer reads


def test_the_gguf_file_has_the_weights_of_the_checkpoint(folder: Path) -> None:
    path = models.gguf_model(folder, "tiny", "bf16", Path(sys.executable))
    made = gguf.GGUFReader(path)
    source = load_file(models.hf_model(folder, "tiny") / "model.safetensors")
    values = {name: field.contents() for name, field in made.fields.items()}
    assert (len(values["tokenizer.ggml.tokens"]), values["qwen3.block_count"]) == (300, 2)
    [tensor] = [tensor for tensor in made.tensors if tensor.name == "blk.1.ffn_down.weight"]
    stored = path.read_bytes()[tensor.data_offset : tensor.data_offset + int(tensor.n_bytes)]
    assert stored == source["model.layers.1.mlp.down_proj.weight"].view(torch.uint8).numpy().tobytes()
