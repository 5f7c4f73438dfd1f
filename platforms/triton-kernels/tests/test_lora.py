"""Grouped products of LoRA adapters: core's cases, mixtures of adapters, and the number of launches."""

from __future__ import annotations

import importlib

import pytest
import torch

from mvllm.ops.lora import add_lora
from mvllm.testing import op_cases

importlib.import_module("platforms.triton-kernels.tests.interpreted")

from mvllm_triton import lora  # noqa: E402  once Triton is imported with its interpreter
from mvllm_triton.kernels import lora as kernels  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)])
def test_every_case_of_core(dtype):
    for trial in op_cases.op_calls("add_lora_by_slot", dtype):
        exact, found = op_cases.exact(trial), lora.add_lora_by_slot(*trial.make())
        assert found.dtype == getattr(torch, dtype) and found.shape == exact.shape
        assert (found.double() - exact).abs().max() <= op_cases.tolerance(dtype) * exact.abs().max(), trial


def mixture(num_tokens, num_slots, *, in_features=300, out_features=130, rank=5, blocks=2):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    y, x = random(num_tokens, out_features), random(num_tokens, in_features)
    down, up = random(num_slots, blocks, rank, in_features) * 0.1, random(num_slots, out_features, rank) * 0.3
    slots = torch.randint(-1, num_slots, (num_tokens,), generator=generator, dtype=torch.int32)
    bands = ((0, 70, 0), (70, 100, 1), (100, out_features, 0))
    return y, x, down, up, slots, bands


def by_loop(y, x, down, up, slots, bands):
    tokens = torch.cat([(slots == slot).nonzero().flatten() for slot in range(len(down))])
    stops = torch.bincount(slots[slots >= 0].long(), minlength=len(down)).cumsum(0).tolist()
    segments = tuple(zip(range(len(down)), [0, *stops], stops))
    return add_lora(y.clone(), x, down, up, tokens, segments, bands)


@pytest.mark.parametrize("num_tokens", [33, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_a_mixture_of_adapters_equals_the_loop_over_adapters(num_tokens):
    arguments = mixture(num_tokens, 6)
    expected = by_loop(*arguments)
    found = lora.add_lora_by_slot(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tokens_without_an_adapter_stay_bit_for_bit():
    y, x, down, up, _, bands = mixture(20, 2)
    slots = torch.full((20,), -1, dtype=torch.int32)
    slots[17] = 1
    found = lora.add_lora_by_slot(y.clone(), x, down, up, slots, bands)
    assert torch.equal(found[slots < 0], y[slots < 0]) and not torch.equal(found[17], y[17])
    x[:17] = torch.nan  # other rows have no influence
    assert torch.equal(lora.add_lora_by_slot(y.clone(), x, down, up, slots, bands)[17], found[17])


@pytest.mark.parametrize("num_slots", [1, 8])
def test_a_layer_takes_two_launches_for_any_number_of_adapters(num_slots, monkeypatch):
    grids = []
    for name in ("lora_shrink", "lora_expand"):
        kernel = getattr(kernels, name)

        class Counted:
            def __init__(self, kernel):
                self.kernel = kernel

            def __getitem__(self, grid):
                grids.append(grid)
                return self.kernel[grid]

        monkeypatch.setattr(kernels, name, Counted(kernel))
    lora.add_lora_by_slot(*mixture(16, num_slots))
    assert len(grids) == 2
