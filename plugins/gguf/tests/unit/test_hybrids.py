"""Weights of hybrid families from GGUF files: those of the checkpoint, packed where the file has blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from plugins.gguf.tests.unit.test_checkpoint import check_same
from plugins.gguf.tests.written_files import make_folder, random_blocks, write_gguf

from mvllm.checkpoint_formats.tensor_entry import TensorEntry
from mvllm.errors import ModelError
from mvllm.models.checkpoint import read_checkpoint
from mvllm.plugin_api import BlockQuantizedWeight
from mvllm_gguf.header import read_gguf
from mvllm_gguf.model_config import model_config
from mvllm_gguf.tensor_names import hf_tensors, packed_modules
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.paged_driver import load_model, make_context
from tests.helpers.thread_ranks import fake_group
from tests.unit.models.test_block_quantization import providers

NAMES = (
    "lfm2",
    "lfm2-biases-untied",
    "lfm2moe",
    "granitehybrid",
    "granitehybrid-dense",
    "mamba2",
    "mamba2-one-group-biases-tied",
    "nemotronh",
    "nemotronh-latent",
    "qwen3next",
    "qwen35-text-tied",
    "qwen35-default-kinds",
    "qwen35moe-text",
    "qwen35moe-tied",
    "kimilinear",
    "kimilinear-query-latent",
    "bamba",
    "bamba-groups",
)
"""Checkpoints of the zoo. Those of Falcon-H1 have other weights in a file."""


def marked(names: Sequence[str], every_run: Sequence[str]) -> list[Any]:
    """Parameters of a test; those that are not in `every_run` for exhaustive runs."""
    return [name if name in every_run else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


MOST_TENSORS = 10_000
GRANITE = {"position_embedding_type": "nope"}  # files have no other hybrid of this family


def checkpoint_of(name: str, folder: Path) -> Path:
    checkpoint = make_checkpoint(name, folder, tokenizer=False)
    if name.startswith("granitehybrid"):
        path = checkpoint / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **GRANITE}))
    return checkpoint


@pytest.mark.parametrize("name", marked(NAMES, ("nemotronh", "qwen35moe-tied", "kimilinear")))
def test_each_rank_gets_the_weights_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(name, tmp_path / "hf")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    folder = make_folder(file, tmp_path / "derived", model_config(read_gguf(file)))
    for context in (
        lambda: make_context(tp=fake_group("tp", 1, 2)),
        lambda: make_context(pp=fake_group("pp", 1, 2)),
    ):
        check_same(load_model(folder, context()), load_model(checkpoint, context()))


@pytest.mark.parametrize("name", marked((*NAMES, "falconh1"), ("granitehybrid", "qwen3next", "lfm2moe")))
def test_the_projections_of_state_layers_stay_packed(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(name, tmp_path / "hf")
    file = write_gguf(checkpoint, tmp_path / "model.gguf", lambda name: "Q8_0")
    model = read_gguf(file)
    tensors = hf_tensors(model, MOST_TENSORS).values()
    quantized = [each for each in tensors if any(source.tensor.type.is_quantized for source in each.sources)]
    assert quantized and all(each.packed_type for each in quantized if "kv_b_proj" not in each.name)
    types = packed_modules(model, MOST_TENSORS)
    config = {**model_config(model), "quantization_config": {"quant_method": "gguf", "tensors": types}}
    seen: list[BlockQuantizedWeight] = []
    folder = make_folder(file, tmp_path / "derived", config)
    load_model(folder, make_context(providers=providers(seen)))
    stored = {
        name.removesuffix(".packed_weight"): entry
        for name, entry in read_checkpoint(folder, packed=lambda name: True).items()
        if name.endswith(".packed_weight")
    }
    layers = [name for name in stored if ".layers." in name and ".experts." not in name]
    head = {"lm_head": "lm_head"} if "lm_head" in stored else {name: name for name in stored if ".embed" in name}
    used = sum(part.data.numel() for weight in seen for part in weight.parts)
    assert used == sum(stored[name].num_bytes for name in (*layers, *head))


ROWS, KEY_HEADS, PER_KEY_HEAD = 6, 2, 3
DELTA_NET = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 64,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "ssm.time_step_rank": KEY_HEADS * PER_KEY_HEAD,
    "ssm.group_count": KEY_HEADS,
    "ssm.state_size": 16,
    "ssm.conv_kernel": 4,
}


def output_projection(folder: Path, kind: str, head_size: int, columns: int | None = None) -> tuple[Path, np.ndarray]:
    """A Qwen3.5 file with one output projection of random blocks; the model folder, and the blocks."""
    size = KEY_HEADS * PER_KEY_HEAD * head_size
    number = gguf.GGMLQuantizationType[kind]
    blocks = random_blocks(number, ROWS, columns or size, seed=7)
    out = gguf.GGUFWriter(folder / "model.gguf", "qwen35")
    for key, value in {**DELTA_NET, "ssm.inner_size": size}.items():
        (out.add_float32 if isinstance(value, float) else out.add_uint32)(f"qwen35.{key}", value)
    out.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    out.add_tensor("blk.0.ssm_out.weight", blocks, raw_dtype=number)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return make_folder(folder / "model.gguf", folder / "derived", {}), blocks


def read_columns(entry: TensorEntry, start: int, stop: int) -> np.ndarray[Any, Any]:
    """Bytes [start, stop) of each row."""
    target = bytearray(ROWS * (stop - start))
    with entry.open_reader() as reader:
        reader.read_strided(memoryview(target), entry, start, stop - start, entry.num_bytes // ROWS)
    return np.frombuffer(target, np.uint8).reshape(ROWS, -1)


@pytest.mark.parametrize(
    ("kind", "head_size", "packed"), [("Q8_0", 32, True), ("Q4_0", 64, True), ("Q4_K", 128, False)]
)
def test_columns_of_value_heads_are_reordered_and_packed_if_heads_are_whole_blocks(
    kind: str, head_size: int, packed: bool, tmp_path: Path
) -> None:
    """In the file the first value heads of all key heads come first; in the checkpoint those of one key head."""
    folder, blocks = output_projection(tmp_path, kind, head_size)
    name = "model.layers.0.linear_attn.out_proj.weight"
    stored = dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(ROWS, PER_KEY_HEAD, KEY_HEADS, head_size)
    expected = stored.swapaxes(1, 2).reshape(ROWS, -1)
    row = expected.shape[1] * 4
    entry = read_checkpoint(folder)[name]
    assert np.array_equal(read_columns(entry, 0, row).view("<f4"), expected)
    start, stop = 2 * head_size * 4, 5 * head_size * 4
    assert np.array_equal(read_columns(entry, start, stop).view("<f4"), expected[:, 2 * head_size : 5 * head_size])
    assert (name.removesuffix(".weight") in packed_modules(read_gguf(tmp_path / "model.gguf"), 100)) == packed
    if packed:
        entry = read_checkpoint(folder, packed=lambda name: True)[name.replace(".weight", ".packed_weight")]
        found = read_columns(entry, 0, entry.num_bytes // ROWS)
        assert np.array_equal(dequantize(found, gguf.GGMLQuantizationType[kind]), expected)


def test_a_projection_without_all_value_heads_is_refused(tmp_path: Path) -> None:
    folder, _ = output_projection(tmp_path, "Q8_0", 32, columns=160)
    with pytest.raises(ModelError, match=r"'blk.0.ssm_out.weight' as Q8_0 of shape \[6, 160\], expected 6 value heads"):
        read_checkpoint(folder)


@pytest.mark.exhaustive
def test_rows_of_each_key_head_in_old_files_of_qwen3_next(tmp_path: Path) -> None:
    """`ssm_in` stacks q, k, v and z of each key head, as the checkpoint does."""
    checkpoint = checkpoint_of("qwen3next", tmp_path / "hf")
    files = {new: write_gguf(checkpoint, tmp_path / f"{new}.gguf", stacked_delta_net=not new) for new in (True, False)}
    assert "blk.0.ssm_in.weight" in read_gguf(files[False]).tensors
    models = [
        load_model(make_folder(file, tmp_path / f"derived-{new}", model_config(read_gguf(file))))
        for new, file in files.items()
    ]
    check_same(*models)


def test_layers_for_multi_token_prediction_are_not_loaded(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("qwen3next", tmp_path / "hf")
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    bases = {"nextn.eh_proj": (), "nextn.enorm": (), "attn_q": (), "attn_norm": (), "ffn_up_exps": (2,)}
    more = {f"blk.{layers}.{base}.weight": torch.zeros(*experts, 32, 32) for base, experts in bases.items()}
    extra = {"qwen3next.block_count": layers + 1, "qwen3next.nextn_predict_layers": 1}
    file = write_gguf(checkpoint, tmp_path / "model.gguf", extra=extra, more_tensors=more)
    folder = make_folder(file, tmp_path / "derived", model_config(read_gguf(file)))
    assert set(more) <= set(read_gguf(file).tensors)
    check_same(load_model(folder), load_model(checkpoint))
