"""The compiled matrix product against float64, on every instruction set that this processor runs."""

from __future__ import annotations

import pytest
import torch

from mvllm.plugin_api import OpCase
from mvllm_cpu import kernels
from mvllm_cpu.linear import AMX, FASTEST_WITH, LARGE, Linear
from mvllm_cpu.ops import KernelOps

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
"""Unit roundoff: the largest relative error of rounding a result."""
FUSED_WITH = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: (),
    torch.float32: FASTEST_WITH["float32"],
}
"""Instruction sets whose kernels read inputs without conversion, so that products and activations are fused."""
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 24, 31, 33, 65)
MANY_ROWS = (95, 97, 193, 515)
SHAPES = (
    (1, 1),
    (1, 64),
    (15, 31),
    (16, 32),
    (17, 33),
    (63, 65),
    (64, 192),
    (65, 193),
    (130, 385),
    (7, 1027),
    (200, 768),
)


@pytest.fixture(scope="module")
def op() -> Linear:
    return Linear(LOADED.library, LOADED.isa)


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x, weight, bias=None):
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_rounds(found, x, weight, bias=None):
    """Fails if an error exceeds the rounding of the result and of float32 sums."""
    assert found.dtype == x.dtype
    expected = exact(x, weight, bias)
    assert found.shape == expected.shape
    sums = exact(x.abs(), weight.abs()) * 2**-24 * (weight.shape[1] ** 0.5 + 4)
    error = (found.double() - expected).abs()
    allowed = expected.abs() * UNIT[x.dtype] * 1.01 + sums + 1e-7
    assert (error <= allowed).all(), (error - allowed).max()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_correct_for_any_shape(op, dtype, shape, bias):
    weight = random(*shape, dtype=dtype)
    offset = random(shape[0], dtype=dtype, seed=1) if bias else None
    packed = op.pack(weight)
    for rows in (*ROWS, *MANY_ROWS):
        x = random(rows, shape[1], dtype=dtype, seed=rows)
        assert_rounds(op.linear(x, packed, offset), x, weight, offset)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_products_are_bit_identical_to_separate_operations(op, dtype, bias):
    silu_and_mul = KernelOps(LOADED.library).silu_and_mul
    for size, in_features in ((16, 64), (48, 192), (208, 386), (512, 100)):
        case = OpCase("linear_silu_and_mul", str(dtype)[6:], {"in_features": in_features, "size": size, "bias": bias})
        if op.supports_silu(case):
            leaves_to_onednn = dtype is torch.bfloat16 and LOADED.isa != AMX and torch.cpu._is_amx_tile_supported()
            assert leaves_to_onednn or LOADED.isa not in FUSED_WITH[dtype]
            continue
        weight = op.pack(random(2 * size, in_features, dtype=dtype))
        offset = random(2 * size, dtype=dtype, seed=1) if bias else None
        for rows in (1, 2, 5, 13, 64, 96, 97, 203):
            x = random(rows, 2 * in_features, dtype=dtype, seed=rows)[:, :in_features]
            found = op.linear_silu_and_mul(x, weight, offset)
            assert torch.equal(found, silu_and_mul(op.linear(x, weight, offset)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_other_rows(op, dtype):
    """A request's results are bit-identical alone and in any batch, at any row index."""
    for out_features, in_features in ((100, 768), (64, 385)):
        packed = op.pack(random(out_features, in_features, dtype=dtype))
        x = random(200, in_features, dtype=dtype, seed=1)
        alone = torch.cat([op.linear(row[None], packed, None) for row in x])
        for rows in (*ROWS, 97, 200):
            for first in (0, 200 - rows):
                assert torch.equal(op.linear(x[first : first + rows], packed, None), alone[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_affect_only_their_row_and_column(op, dtype, value):
    for in_features in (64, 67):
        weight = random(70, in_features, dtype=dtype)
        x = random(20, in_features, dtype=dtype, seed=1)
        x[7, -1] = value
        found = op.linear(x, op.pack(weight), None)
        assert not found[7].isfinite().any() and found[:7].isfinite().all() and found[8:].isfinite().all()
        x = random(20, in_features, dtype=dtype, seed=1)
        weight[69, 0] = value
        found = op.linear(x, op.pack(weight), None)
        assert not found[:, 69].isfinite().any() and found[:, :69].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_inputs_and_weights(op, dtype):
    wide = random(9, 200, dtype=dtype)
    table = random(90, 150, dtype=dtype, seed=1)
    for size in (100, 101):
        weight = table[::2, 3 : 3 + size]
        packed = op.pack(torch.nn.Parameter(weight, requires_grad=False))
        for x in (
            wide[:, 1 : 1 + size],
            wide[::3, 50 : 50 + size],
            wide[:1, :size].expand(7, size),
            random(size, 5, dtype=dtype).t(),
        ):
            assert_rounds(op.linear(x, packed, None), x, weight)
        x = random(2, 3, size, dtype=dtype)
        assert_rounds(op.linear(x, packed, None), x, weight)
        assert op.linear(x[:, :0], packed, None).shape == (2, 0, 45)


def test_nothing_is_written_outside_of_the_result(op):
    """Rows of the result are contiguous, so padding columns must not be written."""
    for rows in (1, 13, 97):
        weight, x = random(37, 64, dtype=torch.bfloat16), random(rows, 64, dtype=torch.bfloat16, seed=1)
        around = torch.full((rows * 37 + 128,), 7.0, dtype=torch.bfloat16)
        packed = op.pack(weight)
        op._linear(
            x.data_ptr(), 64, packed.data.data_ptr(), None, around[64:].data_ptr(), rows, 64, 37, 1
        )  # fmt: skip
        assert (around[:64] == 7).all() and (around[-64:] == 7).all()
        assert torch.equal(around[64:-64].view(rows, 37), op.linear(x, packed, None))


def test_results_do_not_depend_on_the_number_of_threads(op):
    """The sizes are large enough to be divided among threads."""
    before = torch.get_num_threads()
    packed = op.pack(random(1000, 768, dtype=torch.bfloat16))
    try:
        for rows in (1, 16, 200):
            x = random(rows, 768, dtype=torch.bfloat16, seed=1)
            results = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                results.append(op.linear(x, packed, None))
            assert all(torch.equal(results[0], other) for other in results[1:])
    finally:
        torch.set_num_threads(before)


def test_the_packed_weight_is_not_larger_than_the_weight(op):
    assert op.pack(random(128, 768, dtype=torch.bfloat16)).data.numel() == 128 * 768


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_of_a_large_weight_are_released_while_it_is_packed(op, dtype):
    columns = 1027
    weight = random(LARGE // columns // dtype.itemsize + 100, columns, dtype=dtype)
    expected = weight.clone()
    packed = op.pack(weight)
    assert torch.equal(op.lookup(torch.arange(len(expected)), packed), expected)
    assert weight.count_nonzero() < expected.count_nonzero() / 100, "its pages were given back"
    x = random(2, columns, dtype=dtype, seed=1)
    some = slice(len(expected) // 2 - 300, len(expected) // 2 + 300)
    assert_rounds(op.linear(x, packed, None)[:, some], x, expected[some])


def test_memory_adjacent_to_a_large_weight_is_kept(op):
    table = random(LARGE // 1024 // 2 + 10, 1024, dtype=torch.bfloat16)
    expected = table.clone()
    op.pack(table[5:])
    assert torch.equal(table, expected)


def test_cases_with_a_faster_provider_are_declined_with_a_reason():
    def reasons(dtype, isa="avx512_bf16", **facts):
        return " ".join(Linear(LOADED.library, isa).supports(OpCase("linear", dtype, facts)))

    layer = {"in_features": 64, "out_features": 256}
    assert "float64" in reasons("float64", **layer)
    assert "not with avx2" in reasons("float32", "avx2", **layer)
    assert "not with generic" in reasons("bfloat16", "generic", **layer)
    odd = OpCase("linear_silu_and_mul", "bfloat16", {"in_features": 63, "size": 64, "bias": False})
    narrow = OpCase("linear_silu_and_mul", "bfloat16", {"in_features": 64, "size": 40, "bias": False})
    assert all(
        "fused" in " ".join(Linear(LOADED.library, "avx512_bf16").supports_silu(case)) for case in (odd, narrow)
    ) or (torch.cpu._is_amx_tile_supported())
    assert not reasons("float16", **layer) and not reasons("float32", **layer)
    if not torch.cpu._is_amx_tile_supported():
        assert not reasons("bfloat16", **layer)


def test_a_language_model_head_uses_this_kernel_whenever_supported(monkeypatch):
    """Only this packing supports the lookups of a tied token embedding."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    linear = Linear(LOADED.library, "avx512_bf16")
    layer, head = ({"in_features": 64, "out_features": out_features} for out_features in (256, 5000))
    assert "AMX" in " ".join(linear.supports(OpCase("linear", "bfloat16", layer)))
    assert not linear.supports(OpCase("linear", "bfloat16", head))


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_looked_up_rows_equal_the_packed_rows(op, dtype, shape, ids):
    weight = random(*shape, dtype=dtype)
    packed = op.pack(weight)
    some = torch.randint(shape[0], (70,), generator=torch.Generator().manual_seed(1)).to(ids)
    assert torch.equal(op.lookup(some, packed), weight[some.long()])
    assert torch.equal(op.lookup(some[::2], packed), weight[some[::2].long()]), "ids with gaps between them"
    # A vocabulary shard whose first id is 1000, and ids before and after it.
    around = torch.tensor([999, 1000, 1000 + shape[0] - 1, 1000 + shape[0], 0]).to(ids)
    expected = torch.cat((torch.zeros(1, shape[1]), weight[[0, -1]], torch.zeros(2, shape[1]))).to(dtype)
    assert torch.equal(op.lookup(around, packed, 1000), expected)


def test_lookups_of_many_rows_use_all_threads(op):
    weight = random(1000, 512, dtype=torch.bfloat16)
    ids, before = torch.arange(5000) % 1000, torch.get_num_threads()
    packed = op.pack(weight)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(op.lookup(ids, packed), weight[ids])
    finally:
        torch.set_num_threads(before)
