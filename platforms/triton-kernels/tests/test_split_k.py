"""Products of few rows: enough programs for every multiprocessor, and results that do not depend on their order."""

from __future__ import annotations

import importlib
import math
from functools import partial

import pytest
import torch

from mvllm.testing import op_cases

importlib.import_module("platforms.triton-kernels.tests.interpreted")

from mvllm_triton import float8_linear, float8_weight, quantized_linear, quantized_moe  # noqa: E402  once Triton is imported
from mvllm_triton.packed_experts import FLOAT8, INT4, INT8, MXFP4, PackedExperts  # noqa: E402
from mvllm_triton.tiles import inner_splits, most_splits  # noqa: E402

PROCESSORS = 132
SHAPES = [(4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024)]  # in_features, out_features of models of 8B


class Recorder:
    """Stands in for a kernel and records the grids of its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **options: None


@pytest.fixture
def on_a_large_device(monkeypatch):
    for module in (float8_linear, quantized_linear, quantized_moe):
        monkeypatch.setattr(module, "processors", lambda _: PROCESSORS)


@pytest.fixture
def programs(monkeypatch, on_a_large_device):
    """Records launches of the kernels; returns the number of programs of each product."""
    recorders = []
    for module in (float8_linear, quantized_linear, quantized_moe):
        for name in dir(module.kernels):
            if hasattr(getattr(module.kernels, name), "__getitem__"):
                recorder = Recorder()
                monkeypatch.setattr(module.kernels, name, recorder)
                if name in ("fp8_gemm", "quantized_gemm", "fused_moe_quantized"):
                    recorders.append(recorder)
    for name in ("count", "scan", "sort"):
        monkeypatch.setattr(quantized_moe.moe.kernels, f"moe_align_block_size_{name}", Recorder())
    monkeypatch.setattr(importlib.import_module("mvllm_triton.split_k").kernels, "splitk_reduce", Recorder())
    return lambda: [math.prod(grid) for recorder in recorders for grid in recorder.grids]


def product(kind, num_rows, in_features, out_features):
    x = torch.empty(num_rows, in_features, dtype=torch.bfloat16, device="meta")
    if kind.startswith("int"):
        bits = int(kind[3])
        data = torch.empty(out_features, in_features * bits // 8, dtype=torch.uint8, device="meta")
        scales = torch.empty(in_features // 128, out_features, device="meta")
        sizes = in_features, out_features, 128
        weight = quantized_linear.PackedIntegers(data, scales, None, 128, bits, "rounded" in kind, *sizes)
        quantized_linear.quantized_linear(x, weight, None)
    else:
        weight = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn, device="meta")
        block = (128, 128) if kind == "float8 blocks" else None
        shape = (out_features // 128, in_features // 128) if block else (out_features, 1)
        float8_linear.float8_linear(x, weight, torch.empty(shape, device="meta"), block=block)


@pytest.mark.parametrize("kind", ["int4", "int4 rounded", "int8", "float8", "float8 blocks"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_multiprocessor_has_a_program(kind, shape, programs):
    for num_rows in (1, 8, 16):
        product(kind, num_rows, *shape)
    assert len(programs()) == 3
    assert min(programs()) >= PROCESSORS
    assert len(set(programs())) == 1  # the order of sums is the same for all of these


@pytest.mark.parametrize(
    "kind, experts, top_k, hidden, inner",
    [(MXFP4, 128, 4, 2880, 2880), (FLOAT8, 128, 8, 2048, 768), (INT4, 128, 8, 2048, 768), (INT8, 8, 2, 4096, 14336)],
)
def test_every_multiprocessor_has_a_program_of_one_tokens_experts(kind, experts, top_k, hidden, inner, programs):
    def weight(rows, columns):
        shape = experts, rows, columns // 2 if kind in (MXFP4, INT4) else columns
        dtype = torch.float8_e4m3fn if kind == FLOAT8 else torch.uint8
        data = torch.empty(shape, dtype=dtype, device="meta")
        return PackedExperts(kind, data, torch.empty(1, device="meta"), None, 128, 1, 128, columns, rows)

    ids, shares = (torch.empty(1, top_k, dtype=dtype, device="meta") for dtype in (torch.int64, torch.float32))
    x = torch.empty(1, hidden, dtype=torch.bfloat16, device="meta")
    up, down = weight(2 * inner, hidden), weight(hidden, inner)
    quantized_moe.quantized_moe(x, up, None, down, None, ids, shares, None, None)
    assert len(programs()) == 2 and min(programs()) >= PROCESSORS


def test_splits_cover_all_columns_once():
    for in_features in (64, 96, 2880, 4096, 14336):
        for num_programs in (1, 30, 64, 1000):
            splits = inner_splits(num_programs, in_features, 64, PROCESSORS)
            assert splits.size % 64 == 0
            assert (splits.num - 1) * splits.size < in_features <= splits.num * splits.size
    assert inner_splits(2 * PROCESSORS, 4096, 64, PROCESSORS).num == 1


def test_partial_results_are_smaller_than_the_weight():
    for rows in (16, 32, 64):
        splits = most_splits(rows, 4096, 4096 * 2048)
        assert splits == 1 or splits * rows * 4096 * 4 <= 4096 * 2048 // 2
    assert most_splits(128, 4096, 1 << 40) == 1


@pytest.mark.parametrize(
    "op, name, value",
    [
        ("quantized_linear", "group_size", 32),
        ("quantized_linear", "int8_activations", True),
        ("float8_linear", "inputs", "dynamic"),
    ],
)
def test_split_products_are_exact_and_repeatable(op, name, value, monkeypatch):
    module = quantized_linear if op == "quantized_linear" else float8_linear
    pack, function = {
        "quantized_linear": (quantized_linear.pack, quantized_linear.quantized_linear),
        "float8_linear": (partial(float8_weight.pack, native=False), float8_weight.float8_product),
    }[op]
    monkeypatch.setattr(module, "processors", lambda _: 16)
    monkeypatch.setattr(module, "most_splits", lambda *_: 3)
    launched = []
    splitk_reduce = module.splitk_reduce
    monkeypatch.setattr(module, "splitk_reduce", lambda *args: launched.append(args[1]) or splitk_reduce(*args))
    trials = [t for t in op_cases.op_calls(op, "float32") if t.facts["bias"] and t.facts["in_features"] == 384]
    for trial in [t for t in trials if t.facts[name] == value][-1:]:
        x, weight, bias = trial.make()
        packed = pack(weight)
        found, exact = function(x, packed, bias), op_cases.exact(trial)
        assert (found.double() - exact).abs().max() <= op_cases.tolerance("float32") * exact.abs().max(), trial
        assert torch.equal(found, function(x, packed, bias))
    assert {len(parts) for parts in launched} == {3}
