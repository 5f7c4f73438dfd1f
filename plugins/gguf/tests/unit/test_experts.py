"""Experts of GGUF files that stay in blocks give the logits of the dequantized experts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plugins.gguf.tests.written_files import make_folder, write_gguf

from mvllm.layers.quantization.block_quantization import BlockQuantization
from mvllm_gguf.header import read_gguf
from mvllm_gguf.model_config import model_config
from mvllm_gguf.tensor_names import packed_modules
from tests.helpers.model_zoo import make_checkpoint
from tests.unit.models.test_quantized_experts import (
    SIZES,
    check_experts_are_dequantized,
    check_experts_stay_quantized,
    check_split_blocks_are_dequantized,
    divisible_sizes,
)

__all__ = ["divisible_sizes"]


def make_gguf(name: str, folder: Path, *types: str) -> Path:
    """A model folder of a GGUF file. `types`: tensor types of gate, up and down of the experts; others are Q8_0."""
    plain = make_checkpoint(name, folder / "plain", tokenizer=False)
    of_kind = dict(zip(("gate_exps", "up_exps", "down_exps"), types, strict=True))
    file = write_gguf(
        plain,
        folder / "model.gguf",
        lambda tensor: next((kind for end, kind in of_kind.items() if end in tensor), "Q8_0"),
    )
    model = read_gguf(file)
    config = {
        **model_config(model),
        "quantization_config": {"quant_method": "gguf", "tensors": packed_modules(model, 10**6)},
    }
    return make_folder(file, folder / "derived", config)


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "mixtral": lambda folder: make_gguf("mixtral", folder, "Q4_0", "Q5_1", "Q8_0"),
    "deepseek3": lambda folder: make_gguf("deepseek3", folder, "Q5_0", "Q5_0", "Q4_1"),
    "nemotronh": lambda folder: make_gguf("nemotronh", folder, "", "Q5_0", "Q4_1"),
    "gptoss": lambda folder: make_gguf("gptoss", folder, "MXFP4", "MXFP4", "MXFP4"),
}


@pytest.mark.usefixtures("divisible_sizes")
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_logits_equal_those_of_dequantized_experts_on_every_rank(checkpoint: str, tmp_path: Path) -> None:
    check_experts_stay_quantized(CHECKPOINTS[checkpoint](tmp_path))


def test_stacked_experts_are_listed_once(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path / "plain", tokenizer=False)
    stacked = packed_modules(read_gguf(write_gguf(folder, tmp_path / "stacked.gguf", lambda name: "Q4_0")), 10**6)
    experts = {f"model.layers.{layer}.block_sparse_moe.experts.*.w{i}" for layer in (0, 1) for i in (1, 3)}
    assert {name for name in stacked if ".experts." in name} == experts, "the columns of w2 are not whole blocks"
    method = BlockQuantization(stacked)
    assert method.format_of("model.layers.1.block_sparse_moe.experts.3.w1") == "q4_0"
    assert BlockQuantization({"x.experts.3.w1": "Q8_0"}).format_of("x.experts.2.w1") == ""


def with_unsupported_blocks(folder: Path) -> Path:
    """A checkpoint that lists its experts with an unsupported tensor type, which the reader dequantizes."""
    derived = make_gguf("mixtral", folder, "F16", "F16", "F16")
    config = json.loads((derived / "config.json").read_text())
    types = config["quantization_config"]["tensors"]
    types |= {
        f"model.layers.{i}.block_sparse_moe.experts.*.{name}": "Q2_K" for i in (0, 1) for name in ("w1", "w2", "w3")
    }
    (derived / "config.json").write_text(json.dumps(config))
    return derived


def float_formats() -> Iterator[tuple[str, Callable[[Path], Path], str]]:
    yield "declined blocks", CHECKPOINTS["mixtral"], "q5_1"
    yield "other blocks", with_unsupported_blocks, ""
    yield "floats", lambda folder: make_gguf("gptoss", folder, "F16", "F16", "Q8_0"), ""


@pytest.mark.usefixtures("divisible_sizes")
@pytest.mark.parametrize(("checkpoint", "declined"), [pytest.param(*rest, id=name) for name, *rest in float_formats()])
def test_unsupported_experts_are_dequantized(checkpoint: Callable[[Path], Path], declined: str, tmp_path: Path) -> None:
    check_experts_are_dequantized(checkpoint(tmp_path), declined)


@pytest.mark.usefixtures("divisible_sizes")
@pytest.mark.parametrize("checkpoint", ["mixtral", "gptoss"])
def test_shards_that_split_a_block_are_dequantized(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SIZES, "intermediate_size", 96)
    check_split_blocks_are_dequantized(CHECKPOINTS[checkpoint](tmp_path))
