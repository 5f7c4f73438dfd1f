"""Operations on states with static shapes give the results of the references, and read nothing on the host."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mvllm.ops.all_schemas import SCHEMAS
from mvllm.ops.dtypes import torch_dtype
from mvllm.ops.static_state_ops import unit_lower_inverse
from mvllm.plugin_api import OpCase, static_state_ops
from mvllm_conformance.op_cases import exact, op_calls, tolerance
from mvllm_conformance.state_cases import compared
from mvllm_conformance.state_steps import step_by_step, step_cases
from tests.helpers.host_sync import ForbidHostReads, ForbidSynchronizingOps

PROVIDERS = {provider.op: provider for provider in static_state_ops()}
OPS = ("causal_conv1d", "gated_delta_rule", "kda", "ssd")


def test_every_operation_that_updates_states_has_a_provider_with_its_parameters():
    assert set(PROVIDERS) == {op for op, schema in SCHEMAS.items() if schema.updates} == set(OPS)
    for op, provider in PROVIDERS.items():
        assert tuple(inspect.signature(provider.function).parameters)[:-1] == SCHEMAS[op].parameters
        assert provider.supports(OpCase(op, "bfloat16")) == [] != provider.supports(OpCase(op, "float64"))


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("float32", 0),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in [("float32", 1), ("bfloat16", 0)]),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_results_and_states_are_those_of_the_reference_and_nothing_is_read_on_the_host(op, dtype, sizes):
    """Each kind of step, with one of two sizes of the operation."""
    for case in list(op_calls(op, dtype))[sizes::2]:
        arguments = list(case.make())
        with ForbidSynchronizingOps(), ForbidHostReads(lambda tensor: False):
            found = PROVIDERS[op].function(*arguments)
        assert found.dtype == torch_dtype(dtype)
        for mine, theirs in zip(compared(case, [found], arguments), exact(case), strict=True):
            largest = max(1.0, float(theirs.double().abs().max()))
            assert (mine.double() - theirs.double()).abs().max() <= tolerance(dtype) * largest, str(case)


class Calls(TorchDispatchMode):
    """Records the operations and the shapes of their tensors."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else None
        self.found.append((str(func), shape))
        return result


def run(op, lengths, reads, writes, num_tokens, state=None, seed=0):
    """Results, states and operations of one call over `num_tokens` tokens, padding included."""
    case = step_cases(op, "float32")[0]
    given = case.draw(num_tokens, seed)
    (tensor,) = case.spec.tensors
    state = torch.zeros(9, *tensor.shape) if state is None else state
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    slots = torch.tensor(reads).int(), torch.tensor(writes).int()
    with Calls() as calls:
        result = PROVIDERS[op].function(*given, state, bounds, *slots, num_tokens, *case.last)
    return result, state, calls.found


@pytest.mark.parametrize("op", OPS)
def test_the_work_of_a_step_depends_on_its_shape_only(op):
    first = run(op, (5, 1, 30, 4), (-1, 0, 1, 2), (3, 0, 4, 2), 50)
    second = run(op, (1, 40, 0, 0), (2, -1, -1, -1), (2, 1, -1, -1), 50)
    assert first[2] == second[2]


@pytest.mark.parametrize("op", OPS)
def test_a_long_request_among_others_gives_what_it_gives_token_by_token(op):
    """Its tiles are as many as the scan spans, and other requests are before and behind it."""
    case = step_cases(op, "float32")[0]
    lengths = (3, 300, 1, 40)
    result, state, _ = run(op, lengths, (-1,) * 4, (0, 1, 2, 3), 350)
    given, start = case.draw(350, 0), 0
    for slot, length in enumerate(lengths):
        part = [x[start : start + length] if i in case.per_token else x for i, x in enumerate(given)]
        wanted, last = step_by_step(case, part)
        for mine, theirs in ((result[start : start + length], wanted), (state[slot], last)):
            torch.testing.assert_close(mine, theirs, atol=1e-4 * max(1.0, float(theirs.abs().max())), rtol=0)
        start += length


def test_the_inverse_is_as_accurate_as_substitution_where_powers_cancel():
    """Equal keys with a share of 1: powers of the matrix have elements of up to 1e18."""
    size = 64
    below = torch.ones(2, size, size).tril(-1)
    found = unit_lower_inverse(below)
    wanted = torch.eye(size) - torch.eye(size).roll(1, 0).tril(-1)
    assert (found - wanted).abs().max() < 1e-5
    drawn = torch.rand(3, size, size, generator=torch.Generator().manual_seed(0)).tril(-1)
    exact_inverse = torch.linalg.inv((drawn + torch.eye(size)).double())
    largest = exact_inverse.abs().max()
    assert (unit_lower_inverse(drawn).double() - exact_inverse).abs().max() <= 1e-5 * largest


def test_a_hook_runs_before_each_write():
    seen = []
    providers = {each.op: each for each in static_state_ops(lambda state: seen.append(float(state.abs().max())))}
    case = step_cases("ssd", "float32")[0]
    state = torch.zeros(3, *case.spec.tensors[0].shape)
    slots = torch.tensor([0, 4]).int(), torch.tensor([-1]).int(), torch.tensor([1]).int()
    providers["ssd"].function(*case.draw(4, 0), state, *slots, 4, *case.last)
    assert seen == [0.0] and state[1].abs().max() > 0
