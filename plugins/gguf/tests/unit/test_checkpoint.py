"""Weights from GGUF files: which bytes a tensor has, and what each rank reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from plugins.gguf.tests.written_files import make_folder, random_blocks, write_gguf
from safetensors.torch import load_file, save_file

from mvllm.checkpoint_formats.tensor_entry import TensorEntry, packed_name
from mvllm.errors import ModelError
from mvllm.layers.weight_target import WeightTarget
from mvllm.models.causal_lm import CausalLM
from mvllm.models.checkpoint import read_checkpoint
from mvllm.models.weight_loader import load_weights
from mvllm_gguf.checkpoint import GGUFEntry
from mvllm_gguf.header import read_gguf
from mvllm_gguf.model_config import model_config
from mvllm_gguf.tensor_names import packed_modules
from mvllm_gguf.tensor_types import TENSOR_TYPES
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.paged_driver import load_model, make_context
from tests.helpers.thread_ranks import fake_group

ROWS, COLUMNS = 40, 512
VALUE = "model.layers.0.self_attn.v_proj.weight"


def one_matrix(folder: Path, kind: gguf.GGMLQuantizationType) -> tuple[Path, np.ndarray[Any, Any]]:
    """A model folder whose value projection has random blocks of a type, and these blocks."""
    blocks = random_blocks(kind, ROWS, COLUMNS, seed=kind.value)
    out = gguf.GGUFWriter(folder / "model.gguf", "llama")
    out.add_block_count(1)
    out.add_context_length(64)
    out.add_embedding_length(COLUMNS)
    out.add_feed_forward_length(COLUMNS)
    out.add_head_count(8)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_tensor("token_embd.weight", np.zeros((4, COLUMNS), np.float32))
    out.add_tensor("blk.0.attn_v.weight", blocks, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return make_folder(folder / "model.gguf", folder / "derived", {}), blocks


def read(entry: TensorEntry, offset: int, length: int, stride: int | None = None, pieces: int = 1) -> np.ndarray:
    target = bytearray(length * pieces)
    with entry.open_reader() as reader:
        if stride is None:
            reader.read_into(memoryview(target), entry, offset)
        else:
            reader.read_strided(memoryview(target), entry, offset, length, stride)
    return np.frombuffer(target, {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}[entry.dtype])


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType(number) for number in TENSOR_TYPES], ids=lambda k: k.name)
def test_every_type_is_read_by_rows_and_by_columns(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    folder, blocks = one_matrix(tmp_path, kind)
    entry = read_checkpoint(folder)[VALUE]
    plain = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(kind.name)
    expected = blocks.view(plain) if plain else dequantize(blocks, kind)
    assert entry.dtype == (kind.name if plain else "F32") and entry.shape == (ROWS, COLUMNS)
    row = COLUMNS * expected.itemsize
    assert np.array_equal(read(entry, 0, ROWS * row), expected.reshape(-1), equal_nan=plain is not None)
    assert np.array_equal(read(entry, 7 * row, 3 * row), expected[7:10].reshape(-1), equal_nan=plain is not None)
    start, stop = 100 * expected.itemsize, 373 * expected.itemsize  # within blocks
    columns = read(entry, 5 * row + start, stop - start, row, 20)
    assert np.array_equal(columns, expected[5:25, 100:373].reshape(-1), equal_nan=plain is not None)
    every_third = read(entry, row, row, 3 * row, 12)
    assert np.array_equal(every_third, expected[1:37:3].reshape(-1), equal_nan=plain is not None)


FAMILIES = (
    "llama-gqa",
    "mixtral",
    "qwen2moe",
    "gemma3",
    "phi3",
    "gptoss",
    "glm",
    "deepseek3",
    "falcon",
    "falcon-new",
    "olmo2",
    "gpt2",
)
FUSED = ("llama-mqa-biases", "qwen3moe", "deepseek2-groups", "granite")


def derived(checkpoint: Path, folder: Path, **how: Any) -> Path:
    file = write_gguf(checkpoint, folder.with_suffix(".gguf"), **how)
    return make_folder(file, folder, model_config(read_gguf(file)))


def check_same(found: CausalLM, expected: CausalLM) -> None:
    others = dict(expected.named_parameters())
    for name, parameter in found.named_parameters():
        torch.testing.assert_close(parameter, others.pop(name), atol=1e-6, rtol=0, msg=name)
    assert not others


@pytest.mark.parametrize("name", FAMILIES)
def test_each_rank_gets_the_weights_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(name, tmp_path / "hf", tokenizer=False)
    folder = derived(checkpoint, tmp_path / "gguf")
    for context in (
        lambda: make_context(tp=fake_group("tp", 1, 2)),
        lambda: make_context(pp=fake_group("pp", 1, 2)),
    ):
        check_same(load_model(folder, context()), load_model(checkpoint, context()))


@pytest.mark.parametrize("name", FUSED)
def test_files_with_fused_or_unsplit_tensors(name: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(name, tmp_path / "hf", tokenizer=False)
    folder = derived(checkpoint, tmp_path / "gguf", fused=name != "deepseek2-groups", merged_latent=True)
    check_same(load_model(folder), load_model(checkpoint))


def test_ranks_dequantize_their_shard_of_blocks(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama-gqa", tmp_path / "hf", tokenizer=False)
    folder = derived(checkpoint, tmp_path / "gguf", type_of=lambda name: "Q4_1")
    file = checkpoint / "model.safetensors"
    kind = gguf.GGMLQuantizationType.Q4_1
    rounded = {
        name: torch.from_numpy(dequantize(quantize(w.numpy(), kind), kind)) if w.ndim > 1 else w
        for name, w in load_file(file).items()
    }
    save_file(rounded, file, metadata={"format": "pt"})
    for rank in range(4):  # each shard has 24 inner columns, and a block has 32
        context = make_context(tp=fake_group("tp", rank, 4))
        check_same(load_model(folder, context), load_model(checkpoint, make_context(tp=fake_group("tp", rank, 4))))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    sizes: list[int] = []
    preadv = os.preadv

    def count(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(len(buffer) for buffer in buffers))
        return preadv(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", count)
        yield lambda: sum(sizes)


@pytest.mark.parametrize("name", ["llama-gqa", "gptoss", "deepseek3"])
def test_loading_reads_nothing_twice(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = derived(make_checkpoint(name, tmp_path / "hf", tokenizer=False), tmp_path / "gguf")
    size = (tmp_path / "gguf.gguf").stat().st_size
    with counted(monkeypatch) as num_bytes:
        load_model(folder)
    assert num_bytes() < 1.3 * size
    with counted(monkeypatch) as num_bytes:
        load_model(folder, make_context(pp=fake_group("pp", 0, 2)))
    assert num_bytes() < 0.8 * size


def test_packed_weights_are_the_stored_blocks_in_the_order_of_the_rows(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama-gqa", tmp_path / "hf", tokenizer=False)
    folder = derived(checkpoint, tmp_path / "gguf", type_of=lambda name: "F16" if "attn_v" in name else "Q8_0")
    types = packed_modules(read_gguf(tmp_path / "gguf.gguf"), 10_000)
    assert types["model.layers.1.self_attn.q_proj"] == "Q8_0"
    assert "model.layers.1.self_attn.v_proj" not in types and "model.norm" not in types
    entries = read_checkpoint(folder, packed=lambda name: "q_proj" in name)
    values = read_checkpoint(folder)["model.layers.1.self_attn.q_proj.weight"]
    packed = entries["model.layers.1.self_attn.q_proj.packed_weight"]
    assert isinstance(packed, GGUFEntry)
    assert "model.layers.1.self_attn.q_proj.weight" in entries, "a tied embedding may need both"
    assert packed.dtype == "U8" and packed.shape == (64, 2 * 34) and packed.tensor_type.name == "Q8_0"
    rows = read(packed, 8 * 68, 40 * 68).reshape(40, 68)
    expected = read(values, 8 * 256, 40 * 256).reshape(40, 64)
    assert np.array_equal(dequantize(rows, gguf.GGMLQuantizationType.Q8_0), expected)
    second_blocks = read(packed, 8 * 68 + 34, 34, 68, 40).reshape(40, 34)
    assert np.array_equal(second_blocks, rows[:, 34:])


def test_a_model_with_packed_targets_is_given_stored_blocks(tmp_path: Path) -> None:
    folder, blocks = one_matrix(tmp_path, gguf.GGMLQuantizationType.Q4_K)

    class Model(torch.nn.Module):
        """Half of the rows, and of these the second block."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.Parameter(torch.zeros(20, 144, dtype=torch.uint8), requires_grad=False)

        def weight_targets(self) -> dict[str, list[WeightTarget]]:
            source = (slice(20, 40), slice(144, 288))
            target = WeightTarget(self.blocks, (ROWS, 288), source, (slice(0, 20), slice(0, 144)))
            return {packed_name(VALUE): [target]}

        def ignores(self, name: str) -> bool:
            return "embed" in name or name == VALUE

        def given_name(self, name: str) -> str:
            return name

    model = Model()
    load_weights(model, folder, use_tqdm=False)
    assert np.array_equal(model.blocks.numpy(), blocks[20:, 144:])


def test_damaged_changed_and_missing_files_are_refused(tmp_path: Path) -> None:
    folder, _ = one_matrix(tmp_path, gguf.GGMLQuantizationType.Q4_0)
    with pytest.raises(ModelError, match="more than 1 tensors"):
        read_checkpoint(folder, 1)
    os.utime(tmp_path / "model.gguf", ns=(1, 1))
    with pytest.raises(ModelError, match="has changed since"):
        read_checkpoint(folder)
    (folder / "gguf_files.json").write_text('{"files": [{"path": 3}]}')
    with pytest.raises(ModelError, match="a list of objects with path"):
        read_checkpoint(folder)
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(ModelError, match=r"gguf_files.json|cannot be read"):
        read_checkpoint(make_folder_of_a_missing_file(tmp_path))


def make_folder_of_a_missing_file(folder: Path) -> Path:
    (folder / "derived" / "gguf_files.json").write_text(
        f'{{"files": [{{"path": "{folder}/model.gguf", "size": 1, "mtime_ns": 1}}]}}'
    )
    return folder / "derived"
