"""The compiled matrix product against float64, on every instruction set that this processor runs."""

from __future__ import annotations

import pytest
import torch

from mvllm.plugin_api import OpCase
from mvllm_cpu import kernels
from mvllm_cpu.linear import FASTEST_WITH, LARGE, Linear
from mvllm_cpu.ops import KernelOps

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
"""Half the distance of neighbouring values near 1: what rounding a result costs."""
FUSED_WITH = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: (),
    torch.float32: FASTEST_WITH["float32"],
}
"""Instruction sets that multiply inputs as they are, so that the activation can follow at once."""
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
    """Right up to the rounding of the result and of float32 sums."""
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
def test_right_for_any_shape(op, dtype, shape, bias):
    weight = random(*shape, dtype=dtype)
    offset = random(shape[0], dtype=dtype, seed=1) if bias else None
    packed = op.pack(weight)
    for rows in (*ROWS, *MANY_ROWS):
        x = random(rows, shape[1], dtype=dtype, seed=rows)
        assert_rounds(op.linear(x, packed, offset), x, weight, offset)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gated_product_gives_the_bits_of_the_two_operations(op, dtype, bias):
    silu_and_mul = KernelOps(LOADED.library).silu_and_mul
    for size, in_features in ((16, 64), (48, 192), (208, 386), (512, 100)):
        case = OpCase("linear_silu_and_mul", str(dtype)[6:], {"in_features": in_features, "size": size, "bias": bias})
        if op.supports_silu(case):
            assert LOADED.isa not in FUSED_WITH[dtype]
            continue
        weight = op.pack(random(2 * size, in_features, dtype=dtype))
        offset = random(2 * size, dtype=dtype, seed=1) if bias else None
        for rows in (1, 2, 5, 13, 64, 96, 97, 203):
            x = random(rows, 2 * in_features, dtype=dtype, seed=rows)[:, :in_features]
            found = op.linear_silu_and_mul(x, weight, offset)
            assert torch.equal(found, silu_and_mul(op.linear(x, weight, offset)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(op, dtype):
    """Neither on their number nor on its place: a request's tokens are the same alone and in any batch."""
    for out_features, in_features in ((100, 768), (64, 385)):
        packed = op.pack(random(out_features, in_features, dtype=dtype))
        x = random(200, in_features, dtype=dtype, seed=1)
        alone = torch.cat([op.linear(row[None], packed, None) for row in x])
        for rows in (*ROWS, 97, 200):
            for first in (0, 200 - rows):
                assert torch.equal(op.linear(x[first : first + rows], packed, None), alone[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_column(op, dtype, value):
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
def test_layouts_of_x_and_weight(op, dtype):
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


def test_nothing_is_written_beside_the_result(op):
    """Padding columns belong to no one: rows of the result are contiguous."""
    for rows in (1, 13, 97):
        weight, x = random(37, 64, dtype=torch.bfloat16), random(rows, 64, dtype=torch.bfloat16, seed=1)
        around = torch.full((rows * 37 + 128,), 7.0, dtype=torch.bfloat16)
        packed = op.pack(weight)
        op._linear(
            x.data_ptr(), 64, packed.data.data_ptr(), None, around[64:].data_ptr(), rows, 64, 37, 1
        )  # fmt: skip
        assert (around[:64] == 7).all() and (around[-64:] == 7).all()
        assert torch.equal(around[64:-64].view(rows, 37), op.linear(x, packed, None))


def test_threads_change_nothing(op):
    """Large enough for several threads, whatever number this process may use."""
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


def test_packing_takes_no_more_than_the_weight(op):
    assert op.pack(random(128, 768, dtype=torch.bfloat16)).data.numel() == 128 * 768


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_weight_is_packed_piece_by_piece_and_let_go(op, dtype):
    columns = 1027
    weight = random(LARGE // columns // dtype.itemsize + 100, columns, dtype=dtype)
    expected = weight.clone()
    packed = op.pack(weight)
    assert torch.equal(op.lookup(torch.arange(len(expected)), packed), expected)
    assert weight.count_nonzero() < expected.count_nonzero() / 100, "its pages were given back"
    x = random(2, columns, dtype=dtype, seed=1)
    some = slice(len(expected) // 2 - 300, len(expected) // 2 + 300)
    assert_rounds(op.linear(x, packed, None)[:, some], x, expected[some])


def test_what_lies_beside_a_large_weight_stays(op):
    table = random(LARGE // 1024 // 2 + 10, 1024, dtype=torch.bfloat16)
    expected = table.clone()
    op.pack(table[5:])
    assert torch.equal(table, expected)


def test_declined_with_a_reason_where_another_is_faster():
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


def test_a_head_is_ours_wherever_there_is_a_kernel(monkeypatch):
    """Only this form can be the token embedding's, too."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    linear = Linear(LOADED.library, "avx512_bf16")
    layer, head = ({"in_features": 64, "out_features": out_features} for out_features in (256, 5000))
    assert "AMX" in " ".join(linear.supports(OpCase("linear", "bfloat16", layer)))
    assert not linear.supports(OpCase("linear", "bfloat16", head))


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_packed_weight_are_those_that_were_packed(op, dtype, shape, ids):
    weight = random(*shape, dtype=dtype)
    packed = op.pack(weight)
    some = torch.randint(shape[0], (70,), generator=torch.Generator().manual_seed(1)).to(ids)
    assert torch.equal(op.lookup(some, packed), weight[some.long()])
    assert torch.equal(op.lookup(some[::2], packed), weight[some[::2].long()]), "ids with gaps between them"
    # A band that begins with the id 1000, and ids on either side of it.
    around = torch.tensor([999, 1000, 1000 + shape[0] - 1, 1000 + shape[0], 0]).to(ids)
    expected = torch.cat((torch.zeros(1, shape[1]), weight[[0, -1]], torch.zeros(2, shape[1]))).to(dtype)
    assert torch.equal(op.lookup(around, packed, 1000), expected)


def test_many_rows_are_looked_up_by_all_threads(op):
    weight = random(1000, 512, dtype=torch.bfloat16)
    ids, before = torch.arange(5000) % 1000, torch.get_num_threads()
    packed = op.pack(weight)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(op.lookup(ids, packed), weight[ids])
    finally:
        torch.set_num_threads(before)
