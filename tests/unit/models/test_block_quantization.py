"""Matrices that stay in the blocks of a GGUF file give the logits of transformers with the dequantized weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.embedding import VocabEmbedding
from mvllm.layers.quantization.block_quantization import BlockQuantization
from mvllm.ops.all_schemas import SCHEMAS
from mvllm.plugin_api import BlockQuantizedWeight, OpCase, OpProvider
from tests.helpers.model_zoo import load_reference, make_checkpoint
from tests.helpers.paged_driver import PagedDriver, load_model, make_context
from tests.helpers.quantized_zoo import QuantizedCheckpoint
from tests.helpers.thread_ranks import run_ranks
from tests.unit.models.test_parity import reference_logits
from tests.unit.models.test_quantized import PROMPT_LEN, TOKENS, TOLERANCE, run

TYPES = {"v_proj": "Q8_0", "down_proj": "Q4_1", "o_proj": "F16", "_proj": "Q4_0", "embed_tokens": "Q8_0"}
"""Tensor types by suffix of the module name; the first match applies."""


def make_packed(folder: Path, name: str = "llama-gqa") -> QuantizedCheckpoint:
    """A checkpoint with each matrix both packed and dequantized, and a plain one with the dequantized weights."""
    plain, packed = make_checkpoint(name, folder / "plain", tokenizer=False), folder / "packed"
    packed.mkdir()
    for path in plain.glob("*.json"):
        shutil.copy(path, packed)
    tensors = load_file(plain / "model.safetensors")
    blocks: dict[str, torch.Tensor] = {}
    types: dict[str, str] = {}
    for tensor_name, tensor in list(tensors.items()):
        module = tensor_name.removesuffix(".weight")
        kind = next((kind for end, kind in TYPES.items() if module.endswith(end)), "F16")
        if tensor.dim() != 2 or kind == "F16":
            continue
        types[module] = kind
        data = quantize(tensor.float().numpy(), GGMLQuantizationType[kind])
        blocks[f"{module}.packed_weight"] = torch.from_numpy(data)
        tensors[tensor_name] = torch.from_numpy(dequantize(data, GGMLQuantizationType[kind]))
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file({**tensors, **blocks}, packed / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gguf", "tensors": types}
    (packed / "config.json").write_text(json.dumps(config))
    return QuantizedCheckpoint(packed, plain)


def expected(checkpoint: QuantizedCheckpoint) -> torch.Tensor:
    return reference_logits(load_reference(checkpoint.plain), TOKENS, PROMPT_LEN)


def look_up(ids: torch.Tensor, weight: BlockQuantizedWeight, first: int | None = None) -> torch.Tensor:
    """The operation `embedding` with a packed weight."""
    table = weight.dequantize().to(weight.dtype)
    result: torch.Tensor = SCHEMAS["embedding"].reference(ids, table, first)
    return result


def providers(
    seen: list[BlockQuantizedWeight], declined: str = "", lookup: Callable[..., torch.Tensor] | None = None
) -> list[OpProvider]:
    """The reference operations as providers, which append the weights that they prepare to `seen`."""

    def prepare(weight: BlockQuantizedWeight) -> BlockQuantizedWeight:
        seen.append(weight)
        return weight

    def supports(case: OpCase) -> list[str]:
        return ["not this one"] if declined in case.facts["formats"] else []

    ops = ("block_quantized_linear", "block_quantized_linear_silu_and_mul")
    return [OpProvider(op, "blocks", SCHEMAS[op].reference, supports, prepare=prepare, lookup=lookup) for op in ops]


def test_weights_stay_packed_if_a_provider_supports_their_formats(tmp_path: Path) -> None:
    checkpoint = make_packed(tmp_path)
    seen: list[BlockQuantizedWeight] = []
    model = load_model(checkpoint.quantized, make_context(providers=providers(seen)))
    torch.testing.assert_close(run(PagedDriver(model)), expected(checkpoint), atol=TOLERANCE, rtol=0)
    stored = load_file(checkpoint.quantized / "model.safetensors")
    num_bytes = sum(tensor.numel() for name, tensor in stored.items() if name.endswith("_proj.packed_weight"))
    assert sum(part.data.numel() for weight in seen for part in weight.parts) == num_bytes
    assert {weight.formats for weight in seen} == {("q4_0", "q4_0", "q8_0"), ("q4_0", "q4_0"), ("q4_1",)}


def test_weights_are_dequantized_without_a_provider_or_for_an_unsupported_format(tmp_path: Path) -> None:
    checkpoint = make_packed(tmp_path)
    wanted = expected(checkpoint)
    torch.testing.assert_close(run(PagedDriver(load_model(checkpoint.quantized))), wanted, atol=TOLERANCE, rtol=0)
    seen: list[BlockQuantizedWeight] = []
    model = load_model(checkpoint.quantized, make_context(providers=providers(seen, declined="q8_0")))
    torch.testing.assert_close(run(PagedDriver(model)), wanted, atol=TOLERANCE, rtol=0)
    assert {weight.formats for weight in seen} == {("q4_0", "q4_0"), ("q4_1",)}


def test_the_log_names_types_that_are_dequantized_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = make_packed(tmp_path)
    with caplog.at_level("INFO", logger="mvllm"):
        load_model(checkpoint.quantized, make_context(providers=providers([], declined="q4_1")))
    said = [record.getMessage() for record in caplog.records if "are dequantized" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("Matrices in Q4_1, such as model.layers.0."), said
    caplog.clear()
    with caplog.at_level("INFO", logger="mvllm"):
        load_model(checkpoint.quantized, make_context(providers=providers([])))
    assert "are dequantized" not in caplog.text


@pytest.mark.parametrize("lookup", [None, look_up], ids=["floats", "lookup"])
def test_a_tied_lm_head_uses_the_packed_embedding_on_every_rank(
    lookup: Callable[..., torch.Tensor] | None, tmp_path: Path
) -> None:
    checkpoint = make_packed(tmp_path, "llama-odd-vocabulary-tied")
    wanted, seen = expected(checkpoint), list[BlockQuantizedWeight]()

    def logits(tp: object) -> torch.Tensor:
        context = make_context(tp=tp, providers=providers(seen, lookup=lookup))  # type: ignore[arg-type]
        model = load_model(checkpoint.quantized, context)
        [embedding] = [module for module in model.modules() if isinstance(module, VocabEmbedding)]
        assert isinstance(embedding.weight, torch.Tensor) == (lookup is None)
        return run(PagedDriver(model))

    for found in run_ranks(2, logits):
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
    assert sum(weight.formats == ("q8_0",) for weight in seen) == 2


def test_ranks_read_their_shard_of_rows_or_of_whole_blocks(tmp_path: Path) -> None:
    checkpoint = make_packed(tmp_path)
    wanted, seen = expected(checkpoint), list[BlockQuantizedWeight]()

    def logits(tp: object) -> torch.Tensor:
        context = make_context(tp=tp, providers=providers(seen))  # type: ignore[arg-type]
        return run(PagedDriver(load_model(checkpoint.quantized, context)))

    for found in run_ranks(2, logits):
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
    assert ("q4_0", "q4_0", "q8_0") in {weight.formats for weight in seen}


def test_inputs_of_16_bits_are_rounded_to_int8(tmp_path: Path) -> None:
    checkpoint = make_packed(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        seen: list[BlockQuantizedWeight] = []
        load_model(checkpoint.quantized, make_context(dtype=dtype, providers=providers(seen)))
        assert {weight.int8_activations for weight in seen} == {dtype == torch.bfloat16}


def test_tensor_types_must_be_a_mapping() -> None:
    with pytest.raises(ModelError, match="'tensors' should map names of modules to block formats"):
        BlockQuantization.from_config(HFConfig({"tensors": ["model.layers.0.mlp.up_proj"]}, "config.json"))
