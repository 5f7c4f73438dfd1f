"""Filtered sampling: it keeps the same tokens as filters that sort, and samples the same tokens as core."""

from __future__ import annotations

import importlib

import pytest
import torch

from mvllm.ops.draw import draw
from mvllm.testing import op_cases

importlib.import_module("platforms.triton-kernels.tests.interpreted")

from mvllm_triton import sampling  # noqa: E402  once Triton is imported with its interpreter
from mvllm_triton.tiles import histogram_tiles  # noqa: E402

OFF = {"inv_temperature": 1.0, "min_p": 0.0, "top_k": 10**6, "top_p": 1.0}


def arguments(rows, size):
    inverse, min_p, top_k, top_p = (torch.tensor([{**OFF, **row}[name] for row in rows]) for name in OFF)
    return inverse, min_p.log() / inverse, top_k.clamp(max=size), top_p


def kept(logits, found):
    """Which tokens `filters` keeps."""
    bits = (logits + 0.0).view(torch.int32)
    orders = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return orders >= found[1].unsqueeze(1)


def kept_by_sorting(logits, inverse, gap, top_k, top_p):
    stays = []
    for row, i, g, k, p in zip(logits, inverse, gap, top_k, top_p):
        stay = (row >= row.max() + g) & (row >= row.sort(descending=True).values[k - 1])
        weights = torch.where(stay, ((row.double() - row.max().double()) * i.double()).exp(), 0.0)
        if p < 1:
            values, ids = row.sort(descending=True)
            sums = weights[ids].cumsum(0)
            last = values[(sums < p.double() * sums[-1]).sum().clamp(max=len(row) - 1)]
            stay &= row >= last
        stays.append(stay)
    return torch.stack(stays)


ROWS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 100, "inv_temperature": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.05, "inv_temperature": 2.0},
    {"min_p": 0.1},
    {"min_p": 0.01, "top_k": 20, "top_p": 0.7},
    {"top_k": 30, "top_p": 0.5, "inv_temperature": 1.5},
]


@pytest.mark.parametrize(
    "size, spread",
    [(300, 3.0), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((50, 0.1), (700, 0.1)))],
)
def test_filters_keep_the_same_tokens_as_sorting(size, spread):
    logits = torch.randn(len(ROWS), size, generator=torch.Generator().manual_seed(0)) * spread
    given = arguments(ROWS, size)
    found = sampling.filters(logits, *given)
    assert torch.equal(found[0], logits.amax(dim=1))
    assert torch.equal(kept(logits, found), kept_by_sorting(logits, *given))


def test_tokens_that_tie_with_the_last_one_are_kept():
    logits = torch.tensor([[1.0, 0.0, -0.0, 0.0, -2.0, -torch.inf]]).repeat(2, 1)
    found = sampling.filters(logits, *arguments([{"top_k": 2}, {"top_p": 0.7}], 6))
    assert kept(logits, found).tolist() == [[True] * 4 + [False] * 2] * 2


def test_several_programs_share_a_row_and_its_ties():
    """Logits in steps, so that the last kept one has ties in every piece of the row."""
    rows = [{"top_k": 40}, {"top_p": 0.6}, {"top_k": 900, "top_p": 0.5, "min_p": 0.001}]
    logits = (torch.randn(len(rows), 2300, generator=torch.Generator().manual_seed(3)) * 4).round() / 4
    given = arguments(rows, 2300)
    assert histogram_tiles(*logits.shape).piece < 2300
    found = sampling.filters(logits, *given)
    assert torch.equal(kept(logits, found), kept_by_sorting(logits, *given))
    assert (kept(logits, found).sum(dim=1) > torch.tensor([40, 10, 10])).all()


def test_rows_without_a_finite_maximum_draw_any_token_of_the_vocabulary():
    logits = torch.zeros(3, 70)
    logits[0, 5], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    each = torch.full((3,), 0.5)
    found = sampling.sample(logits, *arguments([{"top_k": 3, "top_p": 0.5}] * 3, 70), each, each)
    assert ((found >= 0) & (found < 70)).all()


@pytest.mark.parametrize("size", [37, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_sampled_tokens_equal_cores(size):
    generator = torch.Generator().manual_seed(1)
    rows = ROWS
    logits = torch.randn(len(rows), size, generator=generator) * 2
    logits[:, 3] = -torch.inf
    coarse, fine = torch.rand(2, len(rows), generator=generator)
    given = arguments(rows, size)
    found = sampling.sample(logits, *given, coarse, fine)
    weights = ((logits - logits.amax(dim=1, keepdim=True)) * given[0].unsqueeze(1)).exp()
    weights = torch.where(kept_by_sorting(logits, *given), weights, 0.0)
    assert (weights.gather(1, found.unsqueeze(1)) > 0).all()
    block = sampling.sampled_block(size)
    padded = torch.nn.functional.pad(weights, (0, -size % block))
    share = padded.view(len(rows), -1, block).sum(dim=2)
    expected_block = draw_of(share, coarse)
    assert torch.equal(found // block, expected_block)
    within = padded.view(len(rows), -1, block)[torch.arange(len(rows)), expected_block]
    assert torch.equal(found % block, draw_of(within, fine))


@pytest.mark.parametrize("size", [64, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (300, 1000))])
def test_cases_of_core(size):
    for trial in op_cases.op_calls("filtered_draw", "float32"):
        if trial.facts["size"] == size:
            assert torch.equal(sampling.filtered_draw(*trial.make()), op_cases.exact(trial)), trial


def draw_of(weights, uniform):
    sums = weights.double().cumsum(dim=1)
    return ((sums <= sums[:, -1:] * uniform.double().unsqueeze(1)) | (weights <= 0)).int().argmin(dim=1)


def test_draws_follow_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5]])
    n = 41
    coarse, fine = torch.meshgrid((torch.arange(n) + 0.5) / n, (torch.arange(n) + 0.5) / n, indexing="ij")
    grid = logits.softmax(dim=1)
    found = draw(grid.expand(n * n, -1).contiguous(), coarse.flatten(), fine.flatten())
    share = torch.bincount(found, minlength=5) / n**2
    assert (share - grid[0]).abs().max() < 0.03  # core's error
    pick = torch.arange(0, n * n, 37)
    ours = sampling.sample(
        logits.expand(len(pick), -1).contiguous(), *arguments([{}] * len(pick), 5), coarse.flatten()[pick],
        fine.flatten()[pick],
    )  # fmt: skip
    assert (torch.bincount(ours, minlength=5) / len(pick) - grid[0]).abs().max() < 0.15
