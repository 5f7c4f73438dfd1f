"""The compiled selection of experts against core's reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from mvllm.ops.all_schemas import SCHEMAS
from mvllm_cpu import kernels
from mvllm_cpu.moe import Moe

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")
REFERENCE = SCHEMAS["select_experts"].reference

SETTINGS = [  # top_k, scores, normalize, scale, num_groups, top_groups, group_by
    (1, "softmax", False, 1.0, 1, 1, "best"),
    (8, "softmax", True, 2.5, 1, 1, "best"),
    (12, "softmax", True, 1.0, 1, 1, "best"),
    (3, "softmax", False, 0.5, 4, 2, "best"),
    (4, "sigmoid", True, 2.5, 4, 2, "best_two"),
    (2, "sigmoid", False, 1.0, 3, 1, "best_two"),
    (1, "softmax_of_chosen", False, 1.0, 1, 1, "best"),
    (4, "softmax_of_chosen", False, 0.7, 1, 1, "best"),
]


@pytest.fixture(scope="module")
def select_experts():
    [provider] = [p for p in Moe(LOADED.library).providers() if p.op == "select_experts"]
    return provider.function


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_experts_and_weights_equal_the_reference(select_experts, settings):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, rows, corrected in itertools.product(dtypes, (0, 1, 7, 600), (False, True)):
        logits = (3 * random(rows, 24, seed=rows)).to(dtype)[:, :12]  # rows are strided
        correction = 0.2 * random(12, seed=1) if corrected else None
        weights, ids = select_experts(logits, correction, *settings)
        expected, expected_ids = REFERENCE(logits, correction, *settings)
        assert weights.dtype == torch.float32 and ids.dtype == torch.int64
        if dtype == torch.float32:  # others have equal scores, of which any may be selected
            assert torch.equal(ids, expected_ids)
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_that_are_not_finite_leave_the_others_alone(select_experts, settings):
    logits = random(5, 12)
    expected, expected_ids = select_experts(logits, None, *settings)
    logits[1, 3], logits[2], logits[3, :11], logits[3, 11] = torch.nan, torch.nan, -torch.inf, torch.inf
    weights, ids = select_experts(logits, None, *settings)
    assert torch.equal(weights[[0, 4]], expected[[0, 4]]) and torch.equal(ids[[0, 4]], expected_ids[[0, 4]])
    assert ids.min() >= 0 and ids.max() < 12 and all(len(set(row)) == len(row) for row in ids.tolist())
    assert weights[2].isnan().all()
