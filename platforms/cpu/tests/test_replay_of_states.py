"""Replayed steps of layers with a state: the state is advanced once per step, in the slots of that step."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from mvllm_cpu import kernels
from mvllm_cpu.linear import Linear
from mvllm_cpu.replay import Replay, _Compiled, _Program
from mvllm_cpu.state_ops import StateOps

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")

HIDDEN, HEADS, HEAD_DIM, STATES, SLOTS = 64, 4, 16, 16, 6
INNER, CHANNELS = HEADS * HEAD_DIM, HEADS * HEAD_DIM + 2 * STATES


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The slots of a step, with the attributes that core's arguments of a step have."""

    query_start_loc: torch.Tensor
    read_slots: torch.Tensor
    write_slots: torch.Tensor
    max_query_len: int


def arguments(lens, reads, writes):
    starts = torch.tensor((0, *lens)).cumsum(0).int()
    return Arguments(starts, torch.tensor(reads).int(), torch.tensor(writes).int(), max(lens))


def random(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Mixer:
    """Two Mamba-2 layers of the platform's kernels, called as layers call them."""

    def __init__(self):
        self.ops, linear = StateOps(LOADED.library), Linear(LOADED.library, LOADED.isa)
        self.linear, self.calls = linear.linear, 0
        self.into = linear.pack(random(INNER + CHANNELS + HEADS, HIDDEN, seed=1) / 8)
        self.out = linear.pack(random(HIDDEN, INNER, seed=2) / 8)
        self.conv, self.norm = random(CHANNELS, 4, seed=3), random(INNER, seed=4)
        self.a, self.d = -random(HEADS, seed=5, dtype=torch.float32).exp(), random(HEADS, seed=6, dtype=torch.float32)
        self.states = [
            (
                random(SLOTS + 1, CHANNELS, 3, seed=7 + layer),
                random(SLOTS + 1, HEADS, HEAD_DIM, STATES, seed=9 + layer, dtype=torch.float32),
            )
            for layer in range(2)
        ]

    def __call__(self, x, slots):
        self.calls += 1
        step = slots.query_start_loc, slots.read_slots, slots.write_slots, slots.max_query_len
        for conv_state, ssm_state in self.states:
            gate, xbc, dt = self.linear(x, self.into, None).split((INNER, CHANNELS, HEADS), dim=-1)
            xbc = self.ops.causal_conv1d(xbc, self.conv, None, conv_state, *step, "silu")
            values, b, c = xbc.split((INNER, STATES, STATES), dim=-1)
            y = self.ops.ssd(
                *(values.unflatten(-1, (HEADS, -1)), dt, self.a, b.unflatten(-1, (1, -1)), c.unflatten(-1, (1, -1))),
                *(self.d, None, ssm_state, *step, 0.0, math.inf),
            ).flatten(1)
            x = self.linear(self.ops.gated_rms_norm(y, gate, self.norm, 1e-5, INNER, False, "silu"), self.out, None)
        return x


STEPS = (
    ((1, 1, 1), (0, -1, 2), (0, 1, 2)),  # recorded
    ((1, 1, 1), (0, 1, 2), (0, 1, 2)),
    ((1, 1, 1), (2, 2, 0), (3, 4, 5)),  # two read one slot
    ((1, 1, 0), (3, 4, -1), (3, 4, -1)),  # padding
    ((1, 2), (0, 1), (0, 1)),  # recorded
    ((2, 1), (0, -1), (4, 1)),  # the same shapes
    ((1, 1, 1), (5, 1, 0), (5, 1, 0)),
)


def test_replayed_steps_leave_the_states_that_calls_leave():
    replayed, called = Mixer(), Mixer()
    compiled = Replay(LOADED.library).compile(replayed, dynamic=True)
    assert isinstance(compiled, _Compiled)
    for number, step in enumerate(STEPS):
        x = random(3, HIDDEN, seed=20 + number)
        assert torch.equal(compiled(x.clone(), arguments(*step)), called(x, arguments(*step))), step
        for one, other in zip(replayed.states, called.states, strict=True):
            for found, expected in zip(one, other, strict=True):
                assert torch.equal(found[:SLOTS], expected[:SLOTS]), step
    assert replayed.calls == 2
    assert all(isinstance(program, _Program) for program in compiled._programs.values())


def test_a_step_that_cannot_be_recorded_advances_the_states_once():
    tried, called = Mixer(), Mixer()
    compiled = Replay(LOADED.library).compile(lambda x, slots: tried(x, slots).exp(), dynamic=True)
    for number, step in enumerate(STEPS):
        x = random(3, HIDDEN, seed=20 + number)
        assert torch.equal(compiled(x.clone(), arguments(*step)), called(x, arguments(*step)).exp())
        assert torch.equal(tried.states[1][1][:SLOTS], called.states[1][1][:SLOTS]), step
    assert set(compiled._programs.values()) == {None}
