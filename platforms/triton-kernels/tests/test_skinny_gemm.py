"""Products of few rows: against exact results, with every way to divide them, and their other guarantees."""

from __future__ import annotations

import importlib

import pytest
import torch

from mvllm.testing import op_cases

importlib.import_module("platforms.triton-kernels.tests.interpreted")

from mvllm_triton import activation, skinny_gemm  # noqa: E402  once Triton is imported with its interpreter
from mvllm_triton.tiles import MAX_SKINNY_GEMM_ROWS, SkinnyGemmTiles  # noqa: E402

TILES = {
    "one row": SkinnyGemmTiles(1, 8, 64, 1, 4, 3),
    "one row in parts": SkinnyGemmTiles(1, 8, 32, 3, 4, 3),
    "matrix": SkinnyGemmTiles(16, 16, 64, 1, 1, 3),
    "matrix in parts": SkinnyGemmTiles(16, 32, 32, 4, 2, 3),
}


def make(num_rows, out_features, in_features, dtype="bfloat16", bias=True):
    generator = torch.Generator().manual_seed(num_rows + out_features)
    x, weight, b = (
        torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        for shape in ((num_rows, in_features), (out_features, in_features), (out_features,))
    )
    return x, weight, b if bias else None


def check(found, x, weight, bias):
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == x.dtype and found.shape == exact.shape
    rounded = exact.to(x.dtype)
    neighbours = (found.view(torch.int16).int() - rounded.view(torch.int16).int()).abs()
    assert (neighbours > 0).float().mean() < 0.02, "the result is rounded once"
    name = str(x.dtype).removeprefix("torch.")
    assert (found.double() - exact).abs().max() <= op_cases.tolerance(name) * exact.abs().max()


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 128), (50, 208)], ids=["even", "uneven"])
def test_every_way_to_divide_a_product(tiles, out_features, in_features):
    for dtype, bias in (("bfloat16", True), ("float16", False)):
        x, weight, b = make(1 if tiles.rows == 1 else 5, out_features, in_features, dtype, bias)
        check(skinny_gemm.skinny_gemm(x, weight, b, tiles=tiles), x, weight, b)


@pytest.mark.parametrize("num_rows", [1, 3, 16, pytest.param(33, marks=pytest.mark.exhaustive), MAX_SKINNY_GEMM_ROWS])
def test_the_usual_tiles(num_rows):
    x, weight, bias = make(num_rows, 80, 1040)
    assert skinny_gemm.is_supported(x, weight)
    check(skinny_gemm.skinny_gemm(x, weight, bias), x, weight, bias)


def test_counters_are_zeros_after_a_launch_so_that_it_can_be_repeated(monkeypatch):
    monkeypatch.setattr(skinny_gemm, "_counters", {})
    x, weight, bias = make(4, 50, 208)
    first = skinny_gemm.skinny_gemm(x, weight, bias, tiles=TILES["matrix in parts"])
    [counters] = skinny_gemm._counters.values()
    assert len(counters) >= 2 and not counters.any()
    assert torch.equal(skinny_gemm.skinny_gemm(x, weight, bias, tiles=TILES["matrix in parts"]), first)
    check(skinny_gemm.skinny_gemm(x[:1], weight, bias, tiles=TILES["one row in parts"]), x[:1], weight, bias)
    assert next(iter(skinny_gemm._counters.values())) is counters, "graphs contain their address"


def test_a_capture_without_counters_is_not_split(monkeypatch):
    monkeypatch.setattr(skinny_gemm, "_is_capturing", lambda device: True)
    monkeypatch.setattr(skinny_gemm, "_counters", {})
    x, weight, bias = make(2, 50, 208)
    check(skinny_gemm.skinny_gemm(x, weight, bias, tiles=TILES["matrix in parts"]), x, weight, bias)
    assert skinny_gemm._counters == {}


def test_leading_dimensions_and_strided_tensors():
    x, weight, bias = make(6, 64, 128)
    wide, tall = torch.randn(6, 256).to(x.dtype), torch.randn(64, 256).to(x.dtype)
    wide[:, :128], tall[:, 128:] = x, weight
    found = skinny_gemm.skinny_gemm(wide[:, :128].view(2, 3, 128), tall[:, 128:], bias)
    assert found.shape == (2, 3, 64)
    check(found.flatten(0, 1), x, weight, bias)


def test_what_is_not_supported():
    x, weight, _ = make(2, 8, 64)
    assert skinny_gemm.is_supported(x, weight)
    assert not skinny_gemm.is_supported(x.float(), weight.float())
    assert not skinny_gemm.is_supported(x[:0], weight)
    assert not skinny_gemm.is_supported(x[:, :40], weight[:, :40].contiguous()), "rows of 80 bytes"
    assert not skinny_gemm.is_supported(x, weight.T.contiguous().T)
    assert not skinny_gemm.is_supported(x.expand(40, 2, 64), weight), "80 rows"


@pytest.mark.parametrize(("num_rows", "size", "in_features"), [(1, 48, 128), (1, 33, 80), (3, 64, 128), (20, 50, 144)])
def test_gated_products_are_rounded_like_the_separate_operations(num_rows, size, in_features):
    for dtype, bias in (("bfloat16", True), ("float16", False)):
        x, weight, b = make(num_rows, 2 * size, in_features, dtype, bias)
        weight = weight / in_features**0.5
        separate = activation.silu_and_mul(torch.nn.functional.linear(x, weight, b))
        found = skinny_gemm.skinny_gemm_silu_and_mul(x, weight, b)
        assert found.dtype == x.dtype and found.shape == (num_rows, size)
        neighbours = (found.view(torch.int16).int() - separate.view(torch.int16).int()).abs()
        assert (neighbours > 1).float().mean() < 0.02
        assert (found.float() - separate.float()).abs().max() <= op_cases.tolerance(dtype) * separate.abs().max()
