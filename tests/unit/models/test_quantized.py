"""Quantized checkpoints and online quantization give the logits of transformers with the dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from mvllm.errors import ConfigError
from mvllm.models.causal_lm import CausalLM
from mvllm.ops.quantized_linear import QuantizedWeight
from tests.helpers.model_zoo import load_reference, make_checkpoint
from tests.helpers.paged_driver import PagedDriver, load_model, make_context
from tests.helpers.quantized_zoo import SCHEMES, QuantizedCheckpoint, make_quantized
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.unit.models.test_parity import draw_tokens, reference_logits

TOKENS, PROMPT_LEN = draw_tokens(30, seed=7), 20
TOLERANCE = 1e-4
WEIGHT_ONLY = [name for name, scheme in SCHEMES.items() if not scheme.int8_activations]
INT8_INPUTS = [name for name, scheme in SCHEMES.items() if scheme.int8_activations]


class Int8Inputs(nn.Module):
    """A linear layer with int8 inputs as the formats define it, computed in float64 if float32 is not exact.

    Args:
        weight: [out, in], dequantized.
        bias: [out] or None.
        cut: Number of ranks that shard the columns; each rounds its own part of the input.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, cut: int = 1) -> None:
        super().__init__()
        self.weight, self.bias, self.cut = nn.Parameter(weight), bias, cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = []
        for share in x.chunk(self.cut, dim=-1):
            scale = share.abs().amax(dim=-1, keepdim=True) / 127
            shares.append((share / scale).round().double() * scale.double())
        product = torch.cat(shares, dim=-1) @ self.weight.double().T
        return (product if self.bias is None else product + self.bias.double()).float()


def run(driver: PagedDriver) -> torch.Tensor:
    sequence = driver.add(PROMPT_LEN)
    pieces = (TOKENS[:PROMPT_LEN], TOKENS[PROMPT_LEN:29], TOKENS[29:])
    return torch.cat([driver.step([(sequence, piece)])[0] for piece in pieces])


def expected(checkpoint: QuantizedCheckpoint, *, int8_inputs: bool = False, ranks: int = 1) -> torch.Tensor:
    reference = load_reference(checkpoint.plain)
    if int8_inputs:
        emulate(reference, checkpoint, ranks)
    logits = reference_logits(reference, TOKENS, PROMPT_LEN)
    assert logits.std() > 0.5, "logits too close together to tell right from wrong"
    return logits


def emulate(reference: PreTrainedModel, checkpoint: QuantizedCheckpoint, ranks: int) -> None:
    for name in checkpoint.matrices:
        parent, _, attribute = name.rpartition(".")
        module = reference.get_submodule(parent)
        linear, cut = getattr(module, attribute), ranks if attribute in ("o_proj", "down_proj") else 1
        setattr(module, attribute, Int8Inputs(linear.weight.data, linear.bias, cut))


def check_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal, except for inputs so close to the middle between two integers that float32 may round them to either."""
    off = (found - wanted).abs()
    assert off.median() < 1e-4 * wanted.std() and off.max() < 0.05 * wanted.std(), f"{off.median()=}, {off.max()=}"


@pytest.mark.shows("quantization", by="scheme", family="llama")
@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
def test_logits_equal_transformers_with_the_dequantized_weights(scheme: str, tmp_path: Path) -> None:
    checkpoint = make_quantized(scheme, tmp_path)
    torch.testing.assert_close(
        run(PagedDriver(load_model(checkpoint.quantized))), expected(checkpoint), atol=TOLERANCE, rtol=0
    )


@pytest.mark.shows("quantization", by="scheme", family="llama")
@pytest.mark.parametrize("scheme", INT8_INPUTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_int8_inputs_equal_an_emulation_in_float64(scheme: str, ranks: int, tmp_path: Path) -> None:
    checkpoint = make_quantized(scheme, tmp_path)
    wanted = expected(checkpoint, int8_inputs=True, ranks=ranks)
    for found in run_ranks(ranks, lambda tp: run(PagedDriver(load_model(checkpoint.quantized, make_context(tp=tp))))):
        check_near(found, wanted)
    unrounded = (expected(checkpoint) - wanted).abs()
    assert unrounded.median() > 1e-3 * wanted.std(), "inputs that are not rounded would pass as well"


@pytest.mark.shows("quantization", by="scheme")
@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("gptq", "gpt2"),  # matrices stored as [in, out], three of them fused
        ("gptq", "qwen2"),  # biases
        ("w4a16-zero-points", "llama-mha-tied"),
        ("gptq-head-and-rules", "qwen2-odd-vocabulary"),
    ],
)
def test_other_families_equal_transformers_with_the_dequantized_weights(scheme: str, name: str, tmp_path: Path) -> None:
    checkpoint = make_quantized(scheme, tmp_path, name)
    torch.testing.assert_close(
        run(PagedDriver(load_model(checkpoint.quantized))), expected(checkpoint), atol=TOLERANCE, rtol=0
    )


@pytest.mark.shows("quantization", by="scheme")
@pytest.mark.parametrize(
    ("scheme", "name"),
    [("awq-some-floats", "llama-gqa"), ("gptq-rows", "llama-gqa"), ("gptq", "gpt2"), ("w8a16-rows", "qwen3-mqa")],
)
def test_tensor_parallel_ranks_read_their_shard_of_the_packed_weights(scheme: str, name: str, tmp_path: Path) -> None:
    checkpoint = make_quantized(scheme, tmp_path, name)
    wanted = expected(checkpoint)
    for logits in run_ranks(2, lambda tp: run(PagedDriver(load_model(checkpoint.quantized, make_context(tp=tp))))):
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("scheme", ["gptq-desc-act", "w4a16-zero-points"])
def test_pipeline_stages_equal_transformers_with_the_dequantized_weights(scheme: str, tmp_path: Path) -> None:
    checkpoint = make_quantized(scheme, tmp_path)
    stages = [load_model(checkpoint.quantized, make_context(pp=fake_group("pp", rank, 2))) for rank in range(2)]
    torch.testing.assert_close(run(PagedDriver(*stages)), expected(checkpoint), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("gptq", r"down_proj: tensor_parallel_size=2 cuts its 96 columns within groups of 32.*tensor_parallel_size=1"),
        ("w4a16", r"down_proj: tensor_parallel_size=2 cuts its 96 columns"),
        ("gptq-desc-act", r"o_proj: .*desc_act.* cannot be cut .*Use tensor_parallel_size=1"),
        ("w4a16-actorder", r"o_proj: .*actorder.* cannot be cut"),
    ],
)
def test_indivisible_shards_are_refused_with_a_hint(scheme: str, words: str, tmp_path: Path) -> None:
    checkpoint = make_quantized(scheme, tmp_path)
    with pytest.raises(ConfigError, match=words):
        load_model(checkpoint.quantized, make_context(tp=fake_group("tp", 0, 2)))


# ---------------------------------------------------------------------------------------------------------- on load


WITH_STATES = ("mamba2", "granitehybrid-dense", "falconh1", "bamba", "qwen35", "lfm2", "olmohybrid")
NOISE = {"int8": 0.1, "int4": 0.5}
"""Relative to the standard deviation of the logits. The checkpoints' attention is peaked, which makes errors larger."""


def quantized_weights(folder: Path, quantization: str) -> dict[str, QuantizedWeight]:
    """The weights of the linear layers, by checkpoint name; the reference operation uses them directly."""
    model = load_model(folder, quantization=quantization)
    return {
        m.layout.parts[0].name: m.weight
        for m in model.modules()
        if isinstance(getattr(m, "weight", None), QuantizedWeight)
    }


@pytest.mark.parametrize(("quantization", "bits", "group_size"), [("int8", 8, None), ("int4", 4, 32)])
def test_weights_are_rounded_to_the_nearest_while_they_are_loaded(
    quantization: str, bits: int, group_size: int | None, tmp_path: Path
) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path, tokenizer=False)
    plain, found = load_reference(folder).state_dict(), quantized_weights(folder, quantization)
    assert len(found) == 3 * 4 + 1, "every linear layer and the head"
    for name, weight in found.items():
        floats, is_head = plain[f"{name}.weight"], name == "lm_head"
        near = weight.dequantize()[: len(floats)]
        size = weight.group_size
        assert weight.bits == (8 if is_head else bits)
        assert size == (floats.shape[1] if is_head or group_size is None else group_size)
        assert weight.int8_activations
        for group, start in enumerate(range(0, floats.shape[1], size)):
            half_a_step = weight.scales[: len(floats), group, None] / 2
            off = (near - floats)[:, start : start + size].abs()
            assert (off <= half_a_step * 1.02 + 1e-7).all(), f"{name}, group {group}"


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128])
def test_int4_scales_are_multiples_of_one_scale_per_256_columns(group_size: int, symmetric: bool) -> None:
    from mvllm.layers.quantization.rtn_matrix import round_rows

    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(40, 640, generator=generator) * torch.rand(40, 1, generator=generator)
    floats[3] = 0
    floats[4, 100] = 50.0
    shape = (40, 640 // group_size)
    zero_points = None if symmetric else torch.zeros(shape, dtype=torch.int8)
    weight = QuantizedWeight(torch.zeros(40, 640, dtype=torch.int8), torch.zeros(shape), zero_points, group_size, 4)
    round_rows(floats, weight, slice(0, 40))
    for scales in weight.scales.split(256 // group_size, dim=1):
        units = [unit for most in range(1, 9) if ((unit := scales.amax(dim=1) / most).bfloat16() == unit).any()]
        fits = [(scales / unit[:, None] == (scales / unit[:, None]).round().clamp(1, 8)).all(dim=1) for unit in units]
        assert torch.stack(fits).any(dim=0).all()
    steps = (weight.dequantize() - floats).abs() / weight.scales.repeat_interleave(group_size, dim=1)
    assert steps.max() <= 1.02 / 2, "nothing is clipped"


def test_rows_of_zeros_and_rows_of_one_sign_are_preserved() -> None:
    from mvllm.layers.quantization.rtn_matrix import round_rows

    floats = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 15.0], [-15.0, -1.0, -2.0, 0.0]])
    for bits in (4, 8):
        for zero_points in (torch.zeros(3, 1, dtype=torch.int8), None):
            weight = QuantizedWeight(torch.zeros(3, 4, dtype=torch.int8), torch.zeros(3, 1), zero_points, 4, bits)
            round_rows(floats, weight, slice(0, 3))
            near = weight.dequantize()
            assert torch.equal(near[0], floats[0])
            assert (near - floats).abs().max() <= weight.scales.max() / 2 + 1e-6
            if zero_points is not None and bits == 4:
                torch.testing.assert_close(near, floats)


@pytest.mark.parametrize("damaged", [float("nan"), float("inf")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantization_does_not_hide_a_non_finite_weight(damaged: float, symmetric: bool) -> None:
    from mvllm.layers.quantization.rtn_matrix import round_rows

    floats = torch.tensor([[0.1, damaged, 0.2, 0.3], [0.1, 0.1, 0.2, 0.3]])
    zero_points = None if symmetric else torch.zeros(2, 2, dtype=torch.int8)
    weight = QuantizedWeight(torch.zeros(2, 4, dtype=torch.int8), torch.zeros(2, 2), zero_points, 2, 8)
    round_rows(floats, weight, slice(0, 2))
    assert weight.dequantize().sum(dim=1).isfinite().tolist() == [False, True]


def give_rounded_weights(reference: PreTrainedModel, model: CausalLM) -> None:
    """Writes the engine's quantized weights into transformers' model."""
    for layer in model.modules():
        if not isinstance(weight := getattr(layer, "weight", None), QuantizedWeight):
            continue
        layout, dequantized = layer.layout, weight.dequantize()
        for name in dict.fromkeys(layout.names):
            parts = [part for part in layout.parts if part.name == name]
            rows = torch.full((parts[0].num_rows, dequantized.shape[1]), torch.nan)
            for part in parts:
                rows[part.source] = dequantized[part.destination]
            assert not rows.isnan().any()
            modules: dict[str, Any] = dict(reference.named_modules())
            wanted = "lm_head" if layout.is_head else name
            (found,) = (each for each in (wanted, *model.checkpoint_names(wanted)) if each in modules)
            reference.set_submodule(found, Int8Inputs(rows, modules[found].bias))


@pytest.mark.shows("quantization", by="quantization")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    "name",
    [
        *("llama-mha-tied", "qwen2", "opt-projected", "gpt2"),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in WITH_STATES),
    ],
)
def test_every_family_equals_transformers_with_the_weights_quantized_on_load(
    name: str, quantization: str, tmp_path: Path
) -> None:
    check_quantized_on_load(make_checkpoint(name, tmp_path, tokenizer=False), quantization)


def check_quantized_on_load(folder: Path, quantization: str) -> None:
    model, reference = load_model(folder, quantization=quantization), load_reference(folder)
    plain = reference_logits(reference, TOKENS, PROMPT_LEN)
    give_rounded_weights(reference, model)
    found, wanted = run(PagedDriver(model)), reference_logits(reference, TOKENS, PROMPT_LEN)
    check_near(found, wanted)
    assert (plain - wanted).abs().median() > 1e-3 * wanted.std(), "weights that are not rounded would pass as well"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-mha-tied", "llama-odd-vocabulary-tied"])
def test_quantized_ranks_and_stages_stay_close_to_one_rank(name: str, quantization: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    alone = run(PagedDriver(load_model(folder, quantization=quantization)))
    stages = [
        load_model(folder, make_context(pp=fake_group("pp", rank, 2)), quantization=quantization) for rank in range(2)
    ]
    torch.testing.assert_close(run(PagedDriver(*stages)), alone, atol=1e-5, rtol=0)
    for logits in run_ranks(
        2, lambda tp: run(PagedDriver(load_model(folder, make_context(tp=tp), quantization=quantization)))
    ):
        assert (logits - alone).pow(2).mean().sqrt() < NOISE[quantization] * alone.std()


def test_the_embedding_of_a_tied_lm_head_is_not_quantized(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-mha-tied", tmp_path, tokenizer=False)
    model = load_model(folder, quantization="int8")
    plain = load_reference(folder).state_dict()["model.embed_tokens.weight"]
    assert torch.equal(model.embed_tokens.weight, plain) and model.lm_head.weight.values.dtype == torch.int8
    assert not any(p.dtype == torch.float32 and p.shape[0] == 64 and p.dim() == 2 for p in model.parameters())
