"""The checkpoints that the benchmark of large mixtures writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from tests.perf import mixture_files
from tests.perf.mixture_files import (
    BF16,
    F32,
    GGUF_FORMATS,
    MXFP4,
    Q8_0,
    Mixture,
    Storage,
    Tensor,
    gpt_oss,
    gpt_oss_gguf,
    qwen3,
    write_gpt_oss,
    write_gpt_oss_gguf,
    write_qwen3,
)


def test_sizes_are_those_of_the_published_checkpoints() -> None:
    assert gpt_oss(Path()).num_bytes == 13_761_264_768
    published = qwen3(Path())
    numbers = sum(np.prod(tensor.shape) for part in published.parts.values() for tensor in part)
    assert numbers == 30_532_122_624


def test_a_token_reads_its_experts_and_all_other_weights_but_the_embedding() -> None:
    tensors = [Tensor("e", (7, 2), BF16, share=0.0), Tensor("a", (8, 32), BF16, share=0.25), Tensor("b", (3,), F32)]
    assert Mixture(Path(), {"f": tensors}, 7).bytes_per_token() == (8 * 32 * 2 / 4, 12)


@pytest.mark.parametrize("storage", [*GGUF_FORMATS.values(), Q8_0, MXFP4], ids=lambda storage: storage.name)
def test_random_blocks_have_the_asked_deviation(storage: Storage) -> None:
    tensor = Tensor("t", (64, 2048), storage, 0.05)
    stored = np.frombuffer(b"".join(tensor.pieces()), np.uint8)
    values = gguf.dequantize(stored.reshape(64, -1), gguf.GGMLQuantizationType[tensor.storage.name])
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(0.05, rel=0.6 if storage is MXFP4 else 0.15)  # its scales are powers of two
    assert abs(values.mean()) < 0.001


def small_gguf(folder: Path) -> Mixture:
    path = folder / "small.gguf"
    tensors = [
        Tensor("token_embd.weight", (300, 256), GGUF_FORMATS["q4_k"]),
        Tensor("output_norm.weight", (5,), F32),  # padded
        Tensor("output.weight", (300, 256), GGUF_FORMATS["q4_0"]),
    ]
    return Mixture(path, {path.name: tensors}, 300)


def test_a_stopped_write_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_files, "PIECE", 4096)
    whole, resumed = small_gguf(tmp_path / "a"), small_gguf(tmp_path / "b")
    write_qwen3(whole, layers=0, report=lambda _: None)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(whole.path).tensors}
    assert {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in stored.items()} == {
        tensor.name: tensor.shape for tensor in whole.parts["small.gguf"]
    }
    resumed.path.parent.mkdir()
    contents = whole.path.read_bytes()
    resumed.path.with_suffix(".draft").write_bytes(contents[: stored["output.weight"].data_offset + 9])
    write_qwen3(resumed, layers=0, report=lambda _: None)
    assert resumed.path.read_bytes() == contents
    assert [path.name for path in resumed.path.parent.iterdir()] == ["small.gguf"]


def test_the_engine_reads_the_configuration_of_a_written_mixture(tmp_path: Path) -> None:
    mixture = gpt_oss_gguf(tmp_path, 2, 300)
    experts = {tensor.name for tensor in mixture.parts["gpt-oss-2.gguf"] if "_exps" in tensor.name}
    small = replace(mixture, parts={"gpt-oss-2.gguf": [Tensor("token_embd.weight", (300, 32), Q8_0)]})
    write_gpt_oss_gguf(small, 2, report=lambda _: None)
    values = {name: field.contents() for name, field in gguf.GGUFReader(small.path).fields.items()}
    assert values["general.architecture"] == "gpt-oss"
    assert values["gpt-oss.expert_used_count"] == 4
    assert values["gpt-oss.rope.scaling.type"] == "yarn"
    assert len(experts) == 2 * 6


def test_shards_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    layer = {"one": [Tensor("x", (4, 8), BF16, 1.0)], "two": [Tensor("y", (3,), BF16)]}
    mixture, wrote = replace(gpt_oss(tmp_path), parts=layer), []
    write_gpt_oss(mixture, 24, wrote.append)
    (mixture.path / "two").unlink()
    write_gpt_oss(mixture, 24, wrote.append)
    assert [line.rpartition("/")[2] for line in wrote] == ["one", "two", "two"]
    with safe_open(mixture.path / "one", "pt") as file:
        assert 0.5 < float(file.get_tensor("x").float().std()) < 2


def test_nothing_is_written_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_files, "MARGIN", 1 << 60)
    with pytest.raises(OSError, match="Pass a folder on another disk"):
        write_qwen3(small_gguf(tmp_path), layers=0)
    assert list(tmp_path.iterdir()) == []
