"""Experts: core's cases against exact results, and the order of sorted tokens."""

from __future__ import annotations

import importlib

import pytest
import torch

from mvllm.ops.all_schemas import SCHEMAS
from mvllm.testing import op_cases

importlib.import_module("platforms.triton-kernels.tests.interpreted")

from mvllm_triton import moe, routing  # noqa: E402  once Triton is imported with its interpreter
from mvllm_triton.tiles import expert_tiles, power_of_two, routed_entries  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("op", ["moe", "clamped_moe"])
def test_every_case_of_core(op, dtype):
    for trial in op_cases.op_calls(op, dtype):
        exact, found = op_cases.exact(trial), getattr(moe, op)(*trial.make())
        assert found.dtype == getattr(torch, dtype) and found.shape == exact.shape
        assert (found.double() - exact).abs().max() <= op_cases.tolerance(dtype) * exact.abs().max(), trial


@pytest.mark.parametrize("hidden_size, inner_size", [(40, 24), pytest.param(72, 100, marks=pytest.mark.exhaustive)])
def test_partial_tiles_and_unused_experts(hidden_size, inner_size):
    torch.manual_seed(0)
    x, gate_up = torch.randn(5, hidden_size), torch.randn(9, 2 * inner_size, hidden_size) * 0.1
    down = torch.randn(9, hidden_size, inner_size) * 0.1
    ids = torch.tensor([[7, 0, 8], [7, 2, 0], [0, 7, 2], [8, 7, 0], [7, 0, 2]])
    shares = torch.rand(5, 3)
    expected = SCHEMAS["moe"].reference(x.double(), gate_up.double(), down.double(), ids, shares)
    torch.testing.assert_close(moe.moe(x, gate_up, down, ids, shares).double(), expected, rtol=1e-5, atol=1e-6)


def test_entries_are_ordered_by_expert_and_runs_fill_whole_tiles():
    ids = torch.tensor([[3, 1], [3, 0], [1, 3]] * 8)
    tiles = expert_tiles(ids.numel(), 5, 4)
    order, experts = moe.moe_align_block_size(ids, 5, 8, tiles)
    assert tiles.rows == 16
    assert experts.tolist() == [0, 1, 3, 3, -1, -1, -1, -1]
    for tile, expert in enumerate(experts.tolist()[:4]):
        entries = order[tile * 16 : tile * 16 + 16]
        real = entries[entries < ids.numel()]
        assert (ids.flatten()[real.long()] == expert).all()
        assert (entries[len(real) :] == ids.numel()).all()
    assert sorted(order[:64][order[:64] < 48].tolist()) == list(range(48))


@pytest.mark.parametrize("num_experts", [5, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_experts_keep_the_order_of_their_entries_across_pieces(num_experts):
    ids = torch.rand(150, num_experts, generator=torch.Generator().manual_seed(0)).topk(4, dim=1).indices
    tiles = expert_tiles(ids.numel(), num_experts, 4)
    max_tiles = ids.numel() // tiles.rows + num_experts
    assert ids.numel() > 2 * routed_entries(power_of_two(num_experts))
    order, experts = moe.moe_align_block_size(ids, num_experts, max_tiles, tiles)
    flat, row = ids.flatten(), 0
    for expert in range(num_experts):
        wanted = (flat == expert).nonzero().flatten().tolist()
        num_rows = -(-len(wanted) // tiles.rows) * tiles.rows
        run = order[row : row + num_rows].tolist()
        assert run == wanted + [ids.numel()] * (num_rows - len(wanted))
        assert experts[row // tiles.rows : (row + num_rows) // tiles.rows].tolist() == [expert] * (
            num_rows // tiles.rows
        )
        row += num_rows
    assert (experts[row // tiles.rows :] == -1).all()


def test_counts_of_pieces_become_sums_of_earlier_pieces():
    """Each count is read once, whatever the number of pieces."""
    counts = torch.randint(0, 9, (600 + 1, 21), dtype=torch.int32)
    expected = torch.cat((torch.zeros(1, 21, dtype=torch.int32), counts[:-1].cumsum(0, dtype=torch.int32)))
    moe.kernels.moe_align_block_size_scan[(2,)](counts, 600, NUM_EXPERTS=21, EXPERTS=16, PIECES=256)
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_selected_as_in_every_case_of_core(dtype):
    for trial in op_cases.op_calls("select_experts", dtype):
        arguments = trial.make()
        weights, ids = routing.select_experts(*arguments)
        expected_weights, expected_ids = SCHEMAS["select_experts"].reference(*arguments)
        assert torch.equal(ids, expected_ids) and ids.dtype == torch.int64, trial
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7, msg=str(trial))


def test_a_selection_of_odd_numbers_is_distinct_and_takes_nan_first():
    logits = torch.tensor([[torch.nan, 1.0, -torch.inf, torch.inf, 0.0, -0.0], [-torch.inf] * 6, [2.0] * 6])
    for scores in ("sigmoid", "softmax_of_chosen"):
        _, ids = routing.select_experts(logits, None, 4, scores, False, 1.0, 1, 1, "best")
        assert ids[0, :3].tolist() == [0, 3, 1]
        assert all(len(set(row)) == 4 for row in ids.tolist())
        assert ids[2].tolist() == [0, 1, 2, 3]
    _, ids = routing.select_experts(logits, None, 4, "sigmoid", True, 1.0, 3, 2, "best_two")
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert routing.select_experts(logits[:0], None, 4, "sigmoid", True, 1.0, 1, 1, "best")[1].shape == (0, 4)


def test_too_many_experts_are_refused():
    assert routing.refusals(256, 8, 8) == [] and len(routing.refusals(5000, 40, 64)) == 3
