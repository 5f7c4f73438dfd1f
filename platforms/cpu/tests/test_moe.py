"""The compiled mixture of experts against float64, on every instruction set that this processor runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mvllm.ops.moe import clamped_moe as clamped_reference
from mvllm.ops.moe import moe as reference
from mvllm_cpu import kernels
from mvllm_cpu.moe import Moe

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((64, 32), (96, 40), (67, 33), (256, 192), (130, 65))
"""(hidden_size, intermediate_size): multiples of panels and others, odd sizes included."""


@pytest.fixture(scope="module")
def op() -> Moe:
    return Moe(LOADED.library)


def random(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def experts(num_experts, hidden, inner, dtype):
    gate_up = random(num_experts, 2 * inner, hidden, dtype=dtype, seed=1, scale=hidden**-0.5)
    return gate_up, random(num_experts, hidden, inner, dtype=dtype, seed=2, scale=inner**-0.5)


def packed(op, weights):
    return op.pack(tuple(weight.clone() for weight in weights))


def routing(rows, num_experts, top_k, *, among=None, seed=0):
    """Random distinct experts of each token (from `among` if given), and their weights."""
    generator = torch.Generator().manual_seed(seed)
    names = torch.arange(num_experts) if among is None else torch.tensor(among)
    ids = torch.stack([names[torch.randperm(len(names), generator=generator)[:top_k]] for _ in range(rows)])
    return ids.view(rows, top_k), torch.softmax(torch.randn(rows, top_k, generator=generator), dim=-1)


def exact(x, gate_up, down, ids, weights):
    """The exact result in float64; an expert computes its own tokens only."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for e in ids.unique().tolist():
        tokens, places = (ids == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens].double(), gate_up[e].double()).chunk(2, dim=-1)
        of_expert = F.linear(F.silu(gate) * up, down[e].double())
        out.index_add_(0, tokens, of_expert * weights[tokens, places, None].double())
    return out


def assert_close(found, expected, dtype):
    assert found.dtype == dtype and found.shape == expected.shape
    off = float((found.double() - expected).abs().max() / expected.abs().max())
    assert off < (2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps), off


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes[0]}x{sizes[1]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_correct_for_any_size_and_number_of_tokens(op, dtype, sizes):
    weights = experts(6, *sizes, dtype)
    ready = packed(op, weights)
    for top_k in (1, 2, 6):
        for rows in (1, 2, 7, 33, 230):
            x = random(rows, sizes[0], dtype=dtype, seed=rows)
            chosen = routing(rows, 6, top_k, seed=rows)
            assert_close(op.moe(x, *ready, *chosen), exact(x, *weights, *chosen), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_without_tokens_are_not_read(op, dtype):
    gate_up, down = experts(8, 64, 32, dtype)
    for e in (0, 3, 7):
        gate_up[e], down[e] = float("nan"), float("nan")
    ready = packed(op, (gate_up, down))
    x = random(50, 64, dtype=dtype)
    for among in ([5], [1, 2, 4, 6]):
        chosen = routing(50, 8, 1, among=among)
        assert_close(op.moe(x, *ready, *chosen), exact(x, gate_up, down, *chosen), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_matches_the_reference(op, dtype):
    """Results differ from the reference only by the order of sums."""
    weights = experts(4, 96, 64, dtype)
    x, chosen = random(40, 96, dtype=dtype), routing(40, 4, 2)
    found, wanted = op.moe(x, *packed(op, weights), *chosen), reference(x, *weights, *chosen)
    assert (found == wanted).float().mean() > 0.8
    assert_close(found, wanted.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_does_not_depend_on_other_tokens(op, dtype):
    ready = packed(op, experts(5, 128, 96, dtype))
    x, (ids, weights) = random(120, 128, dtype=dtype), routing(120, 5, 2)
    alone = torch.cat([op.moe(x[t : t + 1], *ready, ids[t : t + 1], weights[t : t + 1]) for t in range(120)])
    for begin, end in ((0, 120), (3, 20), (100, 120)):
        found = op.moe(x[begin:end], *ready, ids[begin:end], weights[begin:end])
        assert torch.equal(found, alone[begin:end])
    x[7] = float("nan")
    found = op.moe(x, *ready, ids, weights)
    assert found[7].isnan().all()
    assert torch.equal(found[:7], alone[:7]) and torch.equal(found[8:], alone[8:])


def test_results_do_not_depend_on_threads_or_the_order_of_experts(op):
    before = torch.get_num_threads()
    ready = packed(op, experts(8, 512, 256, torch.bfloat16))
    x, (ids, weights) = random(64, 512, dtype=torch.bfloat16), routing(64, 8, 3)
    try:
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(op.moe(x, *ready, ids, weights))
            results.append(op.moe(x, *ready, ids.flip(1), weights.flip(1)))
        assert all(torch.equal(results[0], other) for other in results[1:])
    finally:
        torch.set_num_threads(before)


def test_more_tokens_than_one_batch(op):
    """The input is a strided view; results equal those of smaller batches."""
    ready = packed(op, experts(3, 1024, 1024, torch.bfloat16))
    x = random(2500, 2048, dtype=torch.bfloat16)[:, 5:1029]
    ids, weights = routing(2500, 3, 3)
    whole = op.moe(x, *ready, ids, weights)
    pieces = [op.moe(x[i : i + 900], *ready, ids[i : i + 900], weights[i : i + 900]) for i in (0, 900, 1800)]
    assert torch.equal(whole, torch.cat(pieces))
    assert op.moe(x[:0], *ready, ids[:0], weights[:0]).shape == (0, 1024)


@pytest.mark.parametrize("sizes", SIZES[:3], ids=lambda sizes: f"{sizes[0]}x{sizes[1]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamped_experts_match_the_reference_and_unused_experts_are_not_read(op, dtype, sizes):
    hidden, inner = sizes
    gate_up, down = experts(8, hidden, inner, dtype)
    biases = random(8, 2 * inner, dtype=dtype, seed=3), random(8, hidden, dtype=dtype, seed=4)
    x, chosen = random(50, hidden, dtype=dtype, scale=3.0), routing(50, 8, 2, among=[1, 2, 4, 6])
    settings = (*chosen, 1.702, 1.5)
    wanted = clamped_reference(*(t.double() for t in (x, gate_up, biases[0], down, biases[1])), *settings)
    unclamped = clamped_reference(x, gate_up, biases[0], down, biases[1], *chosen, 1.702, 100.0)
    assert (unclamped.double() - wanted).abs().max() > 0.1 * wanted.abs().max(), "no input reaches the limit"
    for e in (0, 3, 5, 7):
        gate_up[e], down[e] = float("nan"), float("nan")
    ready = packed(op, (gate_up, down))
    found = op.clamped_moe(x, ready[0], biases[0], ready[1], biases[1], *settings)
    assert_close(found, wanted, dtype)
    ids, weights = (part[7:8] for part in chosen)
    alone = op.clamped_moe(x[7:8], ready[0], biases[0], ready[1], biases[1], ids, weights, 1.702, 1.5)
    assert torch.equal(alone, found[7:8])
    no_tokens = (x[:0], ready[0], biases[0], ready[1], biases[1], *(part[:0] for part in chosen), 1.702, 1.5)
    assert op.clamped_moe(*no_tokens).shape == (0, hidden)


def test_packing_is_in_place(op):
    gate_up, down = experts(4, 128, 64, torch.bfloat16)
    ready = op.pack((torch.nn.Parameter(gate_up, requires_grad=False), down))
    assert [w.data.data_ptr() for w in ready] == [gate_up.data_ptr(), down.data_ptr()]
