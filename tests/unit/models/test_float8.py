"""FP8 checkpoints give the logits of transformers with the dequantized weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.matrix_layout import MatrixLayout, Part
from mvllm.layers.mla_attention import MLAAttention
from mvllm.layers.quantization.float8_matrix import Float8Matrix
from mvllm.layers.quantization.interface import Float8Format
from mvllm.ops.all_schemas import SCHEMAS
from mvllm.ops.registry import OpTable
from mvllm.plugin_api import Float8Weight, OpCase, OpProvider
from tests.helpers.float8_zoo import FLOAT8_SCHEMES, make_float8
from tests.helpers.model_zoo import load_reference, make_checkpoint
from tests.helpers.paged_driver import PagedDriver, load_model, make_context
from tests.helpers.quantized_zoo import QuantizedCheckpoint
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.unit.models.test_parity import reference_logits
from tests.unit.models.test_quantized import PROMPT_LEN, TOKENS, TOLERANCE, run


def expected(checkpoint: QuantizedCheckpoint) -> torch.Tensor:
    logits = reference_logits(load_reference(checkpoint.plain), TOKENS, PROMPT_LEN)
    assert logits.std() > 0.5, "logits too close together to tell right from wrong"
    return logits


@pytest.mark.shows("quantization", how="fp8", family="llama")
@pytest.mark.parametrize("scheme", FLOAT8_SCHEMES)
def test_logits_equal_transformers_with_the_dequantized_weights(scheme: str, tmp_path: Path) -> None:
    checkpoint = make_float8(scheme, tmp_path)
    found = run(PagedDriver(load_model(checkpoint.quantized)))
    torch.testing.assert_close(found, expected(checkpoint), atol=TOLERANCE, rtol=0)


@pytest.mark.shows("quantization", how="fp8")
@pytest.mark.parametrize(
    ("scheme", "name"), [("fp8-odd-blocks", "llama-gqa"), ("fp8-static", "qwen2"), ("ct-channel", "qwen3-mqa")]
)
def test_ranks_read_their_shard_of_weights_and_scales(scheme: str, name: str, tmp_path: Path) -> None:
    checkpoint = make_float8(scheme, tmp_path, name)
    wanted = expected(checkpoint)
    for logits in run_ranks(2, lambda tp: run(PagedDriver(load_model(checkpoint.quantized, make_context(tp=tp))))):
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)
    stages = [load_model(checkpoint.quantized, make_context(pp=fake_group("pp", rank, 2))) for rank in range(2)]
    torch.testing.assert_close(run(PagedDriver(*stages)), wanted, atol=TOLERANCE, rtol=0)


def test_dequantized_weights_have_the_compute_dtype(tmp_path: Path) -> None:
    checkpoint = make_float8("fp8-blocks", tmp_path)
    model = load_model(checkpoint.quantized, make_context(dtype=torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    plain = load_file(checkpoint.plain / "model.safetensors")
    down = next(m for m in model.modules() if getattr(getattr(m, "layout", None), "names", ()) == (DOWN,))
    assert torch.equal(down.weight, plain[f"{DOWN}.weight"].bfloat16())


DOWN = "model.layers.0.mlp.down_proj"


def test_missing_scales_and_weights_of_another_format_are_reported(tmp_path: Path) -> None:
    folder = make_float8("fp8-blocks", tmp_path).quantized
    tensors = load_file(folder / "model.safetensors")
    scales = tensors.pop(f"{DOWN}.weight_scale_inv")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"missing tensor '{DOWN}.weight_scale_inv'"):
        load_model(folder)
    save_file({**tensors, f"{DOWN}.weight_scale_inv": scales[:-1].contiguous()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"has shape \[1, 6\], expected \[2, 6\]"):
        load_model(folder)
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].bfloat16()
    save_file({**tensors, f"{DOWN}.weight_scale_inv": scales}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"has dtype BF16, expected one of F8_E4M3"):
        load_model(folder)


def test_fp8_weights_without_quantization_config_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path, tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"has dtype F8_E4M3, expected one of F64, F32, F16, BF16.*quantization_config"
    ):
        load_model(folder)


def record_weights(seen: list[Float8Weight], refused: str = "") -> OpProvider:
    """A provider of `float8_linear` that records its weights in `seen`. It does not round inputs, so that logits equal
    those of the dequantized weights."""

    def prepare(weight: Float8Weight) -> Float8Weight:
        seen.append(weight)
        return dataclasses.replace(weight, inputs="floats")

    def supports(case: OpCase) -> list[str]:
        return ["not this one"] if refused and case.facts["inputs"] == refused else []

    return OpProvider("float8_linear", "kept", SCHEMAS["float8_linear"].reference, supports, prepare=prepare)


INPUTS = {"fp8-static": "static", "ct-tensor-static": "static", "ct-blocks": "floats", "ct-groups": "floats"}


@pytest.mark.parametrize("scheme", FLOAT8_SCHEMES)
def test_with_a_provider_of_float8_linear_weights_stay_fp8(scheme: str, tmp_path: Path) -> None:
    checkpoint = make_float8(scheme, tmp_path)
    seen: list[Float8Weight] = []
    model = load_model(checkpoint.quantized, make_context(providers=[record_weights(seen)]))
    torch.testing.assert_close(run(PagedDriver(model)), expected(checkpoint), atol=TOLERANCE, rtol=0)
    stored = load_file(checkpoint.quantized / "model.safetensors")
    num_codes = sum(tensor.numel() for tensor in stored.values() if tensor.dtype == torch.float8_e4m3fn)
    assert sum(weight.codes.numel() for weight in seen) == num_codes
    assert {weight.inputs for weight in seen} == {INPUTS.get(scheme, "dynamic")}
    for weight in seen:
        blocks = [
            -(-size // block)
            for size, block in zip(weight.shape, (weight.block_rows, weight.block_columns), strict=True)
        ]
        assert list(weight.scales.shape) == blocks and weight.scales.numel() * 4 < weight.codes.numel()
        assert (weight.input_scale is not None) == (weight.inputs == "static")


@pytest.mark.parametrize(
    ("scheme", "name"), [("fp8-odd-blocks", "llama-gqa"), ("fp8-blocks", "qwen3-mqa"), ("fp8-static", "qwen2")]
)
def test_ranks_keep_their_shard_of_fp8_weights(scheme: str, name: str, tmp_path: Path) -> None:
    checkpoint = make_float8(scheme, tmp_path, name)
    wanted = expected(checkpoint)
    contexts: Callable[..., BuildContext] = lambda tp: make_context(tp=tp, providers=[record_weights([])])  # noqa: E731
    for logits in run_ranks(2, lambda tp: run(PagedDriver(load_model(checkpoint.quantized, contexts(tp))))):
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


def test_the_input_scale_of_fused_matrices_is_the_largest(tmp_path: Path) -> None:
    folder = make_float8("fp8-static", tmp_path).quantized
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.0.self_attn.k_proj.input_scale"
    save_file({**tensors, key: torch.tensor(0.5)}, folder / "model.safetensors")
    seen: list[Float8Weight] = []
    load_model(folder, make_context(providers=[record_weights(seen)]))
    scales = [float(weight.input_scale) for weight in seen if weight.input_scale is not None]
    assert sorted(set(scales)) == [pytest.approx(0.02), 0.5] and scales.count(0.5) == 1
    del tensors[key]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"missing tensor '{key}'"):
        load_model(folder, make_context(providers=[record_weights([])]))
    load_model(folder)  # without rounded inputs


def test_weights_are_dequantized_if_float8_linear_is_declined_or_bypassed(tmp_path: Path) -> None:
    folder = make_float8("fp8-static", tmp_path).quantized
    seen: list[Float8Weight] = []
    load_model(folder, make_context(providers=[record_weights(seen, refused="static")]))
    asked = OpProvider("linear", "asked for", SCHEMAS["linear"].reference)
    load_model(folder, dataclasses.replace(make_context(), ops=OpTable.resolve([record_weights(seen)], [asked])))
    assert seen == []


def test_experts_and_mla_use_dequantized_weights(tmp_path: Path) -> None:
    checkpoint = make_float8("fp8-blocks", tmp_path, "deepseek3")
    seen: list[Float8Weight] = []
    found = run(PagedDriver(load_model(checkpoint.quantized, make_context(providers=[record_weights(seen)]))))
    assert seen
    torch.testing.assert_close(found, run(PagedDriver(load_model(checkpoint.quantized))), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["deepseek3", "deepseek2-biases"])
@pytest.mark.parametrize("scheme", ["fp8-blocks", "ct-channel", "fp8-one-scale"])
def test_latent_attention_orders_the_rows_of_rotated_elements_once(scheme: str, name: str, tmp_path: Path) -> None:
    checkpoint = make_float8(scheme, tmp_path, name)
    model = load_model(checkpoint.quantized, make_context(providers=[record_weights([])]))
    layers = [module for module in model.modules() if isinstance(module, MLAAttention)]
    assert layers and all(layer._is_ordered and layer.latents.q_a_proj is None for layer in layers)
    torch.testing.assert_close(run(PagedDriver(model)), expected(checkpoint), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("block_rows", "can_be_ordered"), [(None, True), (1, True), (8, True), (4, False)], ids=["all", "one", "8", "4"]
)
def test_rows_are_ordered_among_those_with_the_same_scales(block_rows: int | None, can_be_ordered: bool) -> None:
    layout = MatrixLayout((Part("a", 16, slice(0, 16), slice(0, 16)),), 8, slice(0, 8), 16)
    order = torch.tensor([*range(8), 8, 10, 12, 14, 9, 11, 13, 15])
    found = []
    for is_ordered in (False, True):
        ctx = make_context(providers=[record_weights(seen := [])])
        matrix = Float8Matrix(ctx, layout, Float8Format("weight_scale", block_rows=block_rows, inputs="dynamic"))
        generator = torch.Generator().manual_seed(0)
        for _, target in matrix.targets():
            values = torch.rand(target.parameter.shape, generator=generator)
            target.parameter.data.copy_(values.to(target.parameter.dtype))
        assert matrix.can_reorder_rows(order) == can_be_ordered
        if is_ordered and can_be_ordered:
            matrix.reorder_rows(order)
        matrix.finish()
        found.append(seen[0].dequantize())
    torch.testing.assert_close(found[1], found[0][order if can_be_ordered else slice(None)], atol=0, rtol=0)
