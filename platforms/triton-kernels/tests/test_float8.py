"""Float8: codes bit by bit against torch's, and products against the decoded values in float64."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mvllm.ops.float8_linear import Float8Weight
from mvllm.testing import op_cases

importlib.import_module("platforms.triton-kernels.tests.interpreted")

from mvllm_triton import float8_weight  # noqa: E402  once Triton is imported with its interpreter
from mvllm_triton.attention import paged_attention  # noqa: E402
from mvllm_triton.float8 import LARGEST  # noqa: E402
from mvllm_triton.float8_linear import float8_linear, scaled_fp8_quant  # noqa: E402
from mvllm_triton.float8_weight import float8_product, pack, refusals  # noqa: E402
from mvllm_triton.reshape_and_cache import reshape_and_cache, reshape_and_cache_mla  # noqa: E402

FORMATS = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    pytest.param(torch.float8_e5m2, marks=pytest.mark.exhaustive),
]


def numbers(format_):
    """Every number of a format, the midpoints of neighbours, the floats next to midpoints, and numbers out of range."""
    codes = torch.arange(256, dtype=torch.uint8).view(format_).float()
    known = codes[codes.isfinite()].unique()
    middle = (known[1:] + known[:-1]) / 2
    more = [middle, middle.nextafter(torch.tensor(1e9)), middle.nextafter(torch.tensor(-1e9))]
    found = torch.cat([known, *more, torch.tensor([-0.0, 1e-30, -1e-30, 1e6, -1e6, torch.inf])])
    return torch.nn.functional.pad(found, (0, -len(found) % 8))


@pytest.mark.parametrize("float8", FORMATS, ids=str)
def test_encoding_equals_torchs(float8):
    x = numbers(float8).view(-1, 1, 8)
    cache = torch.zeros(len(x), 1, 1, 8, dtype=float8)
    slots = torch.arange(len(x), dtype=torch.int32)
    reshape_and_cache_mla(x, cache, slots, kv_scale=1.0)
    expected = x.clamp(-LARGEST[float8], LARGEST[float8]).to(float8)
    assert torch.equal(cache.view(torch.uint8).flatten(), expected.view(torch.uint8).flatten())


@pytest.mark.parametrize("float8", FORMATS, ids=str)
def test_decoding_equals_torchs(float8):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(float8).float().isfinite()]
    values = codes.repeat(-(-256 // len(codes)))[:256].view(16, 1, 1, 16)
    # Keys of a single slot each: the softmax of one score is 1, so the result is the value.
    found = paged_attention(
        torch.ones(16, 1, 16), values, values, torch.arange(16, dtype=torch.int32).view(16, 1),
        torch.arange(17, dtype=torch.int32), torch.ones(16, dtype=torch.int32), scale=1e-9, max_query_len=1,
        max_seq_len=1, float8=float8,
    )  # fmt: skip
    assert torch.equal(found.flatten(), values.view(float8).float().flatten())


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_one_scale_for_a_whole_cache(kind, as_tensor):
    torch.manual_seed(0)
    k, v = torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    scales = {torch.int8: (4 / 127, 5 / 127), torch.float8_e4m3fn: (0.02, 0.03)}[kind]
    given = [torch.tensor([scale]) if as_tensor else scale for scale in scales]
    caches = [torch.zeros(2, 4, 2, 16, dtype=kind) for _ in range(2)]
    slots = torch.arange(6, dtype=torch.int32)
    reshape_and_cache(k, v, *caches, slots, k_scale=given[0], v_scale=given[1])
    q = torch.randn(1, 4, 16)
    tables = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    lens = torch.tensor([6], dtype=torch.int32)
    options = {"scale": 0.25, "max_query_len": 1, "max_seq_len": 6}
    found = paged_attention(q, *caches, *tables, lens, k_scale=given[0], v_scale=given[1], **options)
    wide = [cache.float() * scale for cache, scale in zip(caches, scales)]
    torch.testing.assert_close(found, paged_attention(q, *wide, *tables, lens, **options), rtol=1e-4, atol=1e-5)
    assert (wide[0].flatten(0, 1)[:6] - k).abs().max() < 0.15  # the stored keys are the given ones, rounded


def test_scales_of_different_kinds_are_rejected():
    cache, x = torch.zeros(1, 4, 1, 8, dtype=torch.int8), torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match="of one kind"):
        reshape_and_cache(x, x, cache, cache, torch.zeros(1, dtype=torch.int32), k_scale=1.0, v_scale=torch.ones(1))
    with pytest.raises(ValueError, match="8 bits"):
        reshape_and_cache_mla(x, cache.float(), torch.zeros(1, dtype=torch.int32), kv_scale=torch.ones(1))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("scaled", ["tensor", "row", "block", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)], ids=str)
def test_products(dtype, scaled, native):
    torch.manual_seed(0)
    x, bias = torch.randn(3, 2, 80).to(dtype), torch.randn(40).to(dtype)
    weight = (torch.randn(40, 80) * 100).to(torch.float8_e4m3fn)
    shape = {"row": (40, 1), "block": (3, 3)}.get(scaled, (1,))
    scale = torch.rand(shape) * 0.01 + 0.001
    block = (16, 32) if scaled == "block" else None
    static = torch.tensor([0.02]) if scaled == "static" else None
    found = float8_linear(x, weight, scale, bias, block=block, x_scale=static, native=native)
    if static is None:
        codes, row_scales = scaled_fp8_quant(x.view(6, 80), 32 if block else None)
        wide = codes.double() * row_scales.double().repeat_interleave(32 if block else 80, dim=1)[:, :80]
    else:
        wide = (x.view(6, 80).float() / static).to(weight.dtype).double() * static.double()
    assert (wide - x.view(6, 80)).abs().max() < 0.2
    scales = scale.repeat_interleave(16, 0)[:40].repeat_interleave(32, 1)[:, :80] if block else scale
    exact = wide @ (weight.double() * scales.double()).T + bias.double()
    assert found.dtype == dtype and found.shape == (3, 2, 40)
    allowed = {torch.float32: 2e-5, torch.bfloat16: 2**-7}[dtype] * exact.abs().max()
    assert (found.view(6, 40).double() - exact).abs().max() <= allowed


def test_scales_of_wrong_shapes_are_rejected():
    x, weight = torch.zeros(1, 64), torch.zeros(32, 64, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"\[2, 2\]"):
        float8_linear(x, weight, torch.ones(1, 2), block=(16, 32))
    with pytest.raises(ValueError, match="one scale or 32"):
        float8_linear(x, weight, torch.ones(3))
    with pytest.raises(ValueError, match="power of two"):
        float8_linear(x, weight, torch.ones(1, 1), block=(16, 24))
    with pytest.raises(ValueError, match="float32"):
        float8_linear(x, weight.float(), torch.ones(1))


@pytest.mark.parametrize("scaled", ["row", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_with_unquantized_inputs(dtype, scaled):
    torch.manual_seed(0)
    x, weight = torch.randn(6, 80).to(dtype), (torch.randn(40, 80) * 100).to(torch.float8_e4m3fn)
    block = (16, 32) if scaled == "block" else None
    scale = torch.rand((3, 3) if block else (40, 1)) * 0.01 + 0.001
    found = float8_linear(x, weight, scale, block=block, rounded=False)
    wide = scale.repeat_interleave(16, 0)[:40].repeat_interleave(32, 1)[:, :80] if block else scale
    exact = x.double() @ (weight.double() * wide.double()).T
    allowed = {torch.float32: 2e-5, torch.bfloat16: 2**-7}[dtype] * exact.abs().max()
    assert (found.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("given", [None, torch.tensor([0.02])], ids=["dynamic", "static"])
def test_a_nan_affects_only_its_own_row(given):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    expected = float8_linear(x, EYE, torch.ones(1), x_scale=given, native=False)
    x[1, 5] = torch.nan
    found = float8_linear(x, EYE, torch.ones(1), x_scale=given, native=False)
    assert found[1].isnan().all() and torch.equal(found[::2], expected[::2])


EYE = torch.eye(64).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("format_", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
@pytest.mark.parametrize("most", [80, pytest.param(384, marks=pytest.mark.exhaustive)])
def test_products_with_packed_weights_are_exact_in_both_formats(most, format_):
    trials = [t for t in op_cases.op_calls("float8_linear", "float32") if t.facts["in_features"] <= most]
    trials = [t for t in trials if t.facts["bias"] or most > 80]
    assert {t.facts["inputs"] for t in trials} == {"floats", "dynamic", "static"}
    for trial in trials:
        assert refusals(trial.facts["in_features"], trial.facts["block_columns"]) == []
        x, weight, bias = trial.make()
        found, exact = float8_product(x, pack(weight, format_, native=False), bias), op_cases.exact(trial)
        assert (found.double() - exact).abs().max() <= op_cases.tolerance("float32") * exact.abs().max(), trial


@pytest.mark.parametrize("format_", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_packing_keeps_every_number_and_nan(format_):
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    whole = pack(Float8Weight(codes, torch.ones(16, 1), 1, 16), format_)
    wide = whole.weight.float() * whole.scale.view(16, 1)
    expected = codes.view(torch.float8_e4m3fn).float()
    lines = expected.isfinite().all(dim=1)
    assert torch.equal(wide[lines], expected[lines])
    assert whole.scale.view(16).isnan().tolist() == (~lines).tolist() == [False] * 7 + [True] + [False] * 7 + [True]
    halves = torch.cat((codes[:2].view(1, 32), codes[7:8].repeat(1, 2)), dim=1)
    assert pack(Float8Weight(halves, torch.ones(1, 2), 1, 32), format_).scale.isnan().tolist() == [[False, True]]


def test_packing_takes_a_few_operations_whatever_the_number_of_scales(monkeypatch):
    class Counted(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += 1
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(float8_weight, "_CODES_AT_ONCE", 64 * 40)
    found = []
    for rows, block in ((64, (1, 40)), (640, (1, 40)), (300, (128, 32))):
        codes = torch.randint(0, 127, (rows, 40), dtype=torch.uint8)
        codes[rows - 1, 39] = 0xFF
        shape = -(-rows // block[0]), -(-40 // block[1])
        with Counted() as counted:
            scales = pack(Float8Weight(codes, torch.ones(shape), *block)).scale
        assert scales.isnan().sum() == 1 and scales.flatten()[-1].isnan()
        found.append(counted.number)
    assert max(found) < 150  # six of each row were thousands


def test_weights_with_unsupported_blocks_are_rejected():
    assert refusals(128, 24) and refusals(128, 16) and not refusals(24, 24)
    with pytest.raises(ValueError, match="power of two from 32 on"):
        pack(Float8Weight(torch.zeros(4, 128, dtype=torch.uint8), torch.ones(1, 6), 4, 24))
