"""Compiled operations against core's references."""

from __future__ import annotations

import pytest
import torch

from mvllm.ops.all_schemas import SCHEMAS
from mvllm.plugin_api import OpCase
from mvllm_cpu import kernels, onednn_linear
from mvllm_cpu.ops import KernelOps, supports

needs_kernels = pytest.mark.skipif(kernels.load().library is None, reason=f"no kernels: {kernels.load().reason}")

# Another order of sums or a fused multiply-add may round a result to an adjacent value of its dtype. A norm rounds
# twice, so it may differ by two values.
NEIGHBOUR = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.fixture(scope="module")
def ops():
    return {provider.op: provider.function for provider in KernelOps(kernels.load().library).providers()}


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=NEIGHBOUR[found.dtype], atol=NEIGHBOUR[found.dtype] / 16)


@needs_kernels
@pytest.mark.parametrize("dtype", NEIGHBOUR, ids=str)
@pytest.mark.parametrize("rows, size", [(1, 64), (7, 100), (300, 768), (3, 5)])
class TestRows:
    def test_rms_norm(self, ops, dtype, rows, size):
        x, weight = random(rows, 2 * size, dtype=dtype)[:, :size], random(size, dtype=dtype, seed=1)
        assert_near(ops["rms_norm"](x, weight, 1e-5), SCHEMAS["rms_norm"].reference(x, weight, 1e-5))

    def test_rms_norm_of_heads(self, ops, dtype, rows, size):
        fused, weight = random(rows, 3 * size + 8, dtype=dtype), random(size, dtype=dtype, seed=1)
        x = fused[:, 8 : 8 + 2 * size].view(rows, 2, size)
        assert_near(ops["rms_norm"](x, weight, 1e-5), SCHEMAS["rms_norm"].reference(x, weight, 1e-5))

    def test_fused_add_rms_norm(self, ops, dtype, rows, size):
        x, residual, weight = (random(rows, size, dtype=dtype, seed=i) for i in range(3))
        weight = weight[0].contiguous()
        expected = SCHEMAS["fused_add_rms_norm"].reference(x, residual, weight, 1e-5)
        found = ops["fused_add_rms_norm"](x, residual.clone(), weight, 1e-5)
        assert_near(found[0], expected[0])
        assert torch.equal(found[1], expected[1])

    @pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
    def test_gates(self, ops, dtype, rows, size, name):
        x = random(rows, 2 * size, dtype=dtype) * 8
        x[0, 0], x[0, 1] = 200, -200
        # In float32, the relative error of torch's gelu at -4 is a third, because 1 + tanh cancels.
        exact = x.double() if dtype == torch.float32 else x
        assert_near(ops[name](x), SCHEMAS[name].reference(exact).to(dtype))


@needs_kernels
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", NEIGHBOUR, ids=str)
@pytest.mark.parametrize("head_size, rotary_dim", [(64, 64), (40, 24), (128, 128), (80, 32)])
def test_rotary_embedding_rotates_in_place(ops, dtype, index_dtype, head_size, rotary_dim):
    tokens, heads, kv_heads = 9, 4, 2
    angles = torch.rand(50, rotary_dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    index = torch.randint(0, 50, (tokens,), dtype=index_dtype)
    fused = random(tokens, (heads + 2 * kv_heads) * head_size, dtype=dtype)

    def split(x):
        q, k, v = x.split([heads * head_size, kv_heads * head_size, kv_heads * head_size], dim=1)
        return q.view(tokens, heads, head_size), k.view(tokens, kv_heads, head_size), v

    expected = SCHEMAS["rotary_embedding"].reference(index, *split(fused.clone())[:2], cos_sin)
    query, key, value = split(fused)
    untouched = value.clone()
    found = ops["rotary_embedding"](index, query, key, cos_sin)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=NEIGHBOUR[dtype], atol=NEIGHBOUR[dtype] * 2)
    assert torch.equal(value, untouched)


@needs_kernels
@pytest.mark.parametrize("dtype", NEIGHBOUR, ids=str)
@pytest.mark.parametrize("size", [1, 3, 16, 31, 64, 1000, 32000])
def test_argmax(ops, dtype, size):
    for rows in (0, 1, 2, 9):
        x = random(rows, size + 8, dtype=dtype, seed=size)[:, 3 : 3 + size]
        values, ids = ops["argmax"](x)
        assert values.dtype == dtype and ids.dtype == torch.int64 and ids.shape == (rows,)
        if rows:
            assert torch.equal(values, x.amax(dim=1)) and torch.equal(ids, (x == values[:, None]).int().argmax(dim=1))
    x = torch.full((4, size), -torch.inf, dtype=dtype)
    x[1, -1], x[2, size // 2], x[3] = 5, torch.nan, torch.inf
    x[2, 0] = torch.inf if size > 1 else torch.nan
    values, ids = ops["argmax"](x)
    assert values[0] == -torch.inf and values[1] == 5 and values[2].isnan() and values[3] == torch.inf
    assert ids.tolist() == [0, size - 1, size // 2, 0]


@needs_kernels
@pytest.mark.parametrize("dtype", NEIGHBOUR, ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_embedding(ops, dtype, ids_dtype):
    table = random(50, 40, dtype=dtype)[:, 2:37]
    for rows in (0, 1, 9, 5000):
        ids = (torch.arange(rows) * 7 % 50).to(ids_dtype)
        assert torch.equal(ops["embedding"](ids, table), table[ids.long()])
        assert torch.equal(ops["embedding"](ids[::2], table), table[ids[::2].long()])
        band = ops["embedding"](ids, table[10:30], 10)
        assert torch.equal(band, SCHEMAS["embedding"].reference(ids, table[10:30], 10))
        assert torch.equal(band, table[ids.long()] * ((ids >= 10) & (ids < 30))[:, None])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_features, in_features", [(100, 64), (37, 129), (768, 256)])
def test_packed_linear(out_features, in_features, bias):
    if not onednn_linear.providers():
        pytest.skip("this torch packs no weights")
    weight = random(out_features, in_features, dtype=torch.bfloat16)
    offset = random(out_features, dtype=torch.bfloat16, seed=1) if bias else None
    packed = onednn_linear.pack(torch.nn.Parameter(weight, requires_grad=False))
    for rows in (0, 1, 3, 50):
        x = random(rows, in_features, dtype=torch.bfloat16, seed=2)
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
        found = onednn_linear.linear(x, packed, offset)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=0.02)


def test_unsupported_dtypes_have_reasons():
    assert supports(OpCase("rms_norm", "float64")) and not supports(OpCase("rms_norm", "bfloat16"))
    assert "float32" in onednn_linear.supports(OpCase("linear", "float32"))[0]
