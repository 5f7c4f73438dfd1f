"""The compiled operations of layers with a state, against core's references and against themselves."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mvllm.ops.all_schemas import SCHEMAS
from mvllm.plugin_api import OpCase
from mvllm.testing.op_cases import exact, op_calls, tolerance
from mvllm.testing.state_cases import compared, has_state
from mvllm_cpu import kernels
from mvllm_cpu.state_ops import StateOps

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")

STATE_OPS = ("causal_conv1d", "ssd", "gated_delta_rule", "kda")
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def ops():
    return {provider.op: provider.function for provider in StateOps(LOADED.library).providers()}


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [*STATE_OPS, "gated_rms_norm"])
def test_every_case_of_core(ops, op, dtype):
    for case in op_calls(op, dtype):
        arguments = case.make()
        result, wanted = ops[op](*arguments), exact(case)
        assert result.dtype == getattr(torch, dtype)
        found = compared(case, [result], arguments) if has_state(op) else [result]
        for one, other in zip(found, wanted if has_state(op) else [wanted], strict=True):
            # States are float32 for every compute dtype, or have exact elements.
            allowed = 2e-5 if one.dtype == torch.float32 else tolerance(dtype)
            assert (one.double() - other).abs().max() <= allowed * other.abs().max(), case


def sequence(op, tokens, dtype):
    """Arguments of one sequence: those per token, others, the last ones, and the shape of the state."""
    if op == "causal_conv1d":
        weight, bias = random(520, 4, dtype=dtype, seed=1), random(520, dtype=dtype, seed=2)
        return {"x": random(tokens, 520, dtype=dtype)}, (weight, bias), ("silu",), (520, 3)
    if op == "ssd":
        per_token = {
            "x": random(tokens, 4, 64, dtype=dtype),
            "dt": random(tokens, 4, dtype=dtype, seed=1),
            "a": -random(4, seed=2).exp(),
            "b": random(tokens, 2, 128, dtype=dtype, seed=3),
            "c": random(tokens, 2, 128, dtype=dtype, seed=4),
        }
        return per_token, (random(4, seed=5), random(4, seed=6)), (0.0, float("inf")), (4, 64, 128)
    decays = (tokens, 4, 128) if op == "kda" else (tokens, 4)
    k_heads = 4 if op == "kda" else 2
    per_token = {
        "q": random(tokens, k_heads, 128, dtype=dtype),
        "k": random(tokens, k_heads, 128, dtype=dtype, seed=1),
        "v": random(tokens, 4, 128, dtype=dtype, seed=2),
        "g": -random(*decays, seed=3).exp(),
        "beta": random(tokens, 4, dtype=dtype, seed=4).sigmoid(),
    }
    return per_token, (), (128**-0.5, True), (4, 128, 128)


def run_sequence(function, op, dtype, lens):
    """Results and last state of a sequence that is cut into steps of `lens` tokens; each writes another slot."""
    per_token, middle, last, shape = sequence(op, sum(lens), dtype)
    state = torch.full((3, *shape), torch.nan, dtype=dtype if op == "causal_conv1d" else torch.float32)
    state[0] = random(*shape, seed=9)
    slot, results = 0, []
    for start, stop in pairwise([0, *torch.tensor(lens).cumsum(0).tolist()]):
        tokens = [value if name == "a" else value[start:stop] for name, value in per_token.items()]
        step = [torch.tensor(values, dtype=torch.int32) for values in ((0, stop - start), (slot,), (1 - slot,))]
        results.append(function(*tokens, *middle, state, *step, stop - start, *last))
        slot = 1 - slot
    return torch.cat(results), state[slot]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", STATE_OPS)
def test_a_prompt_has_the_same_bits_however_it_is_cut_and_is_near_the_reference(ops, op, dtype):
    whole = run_sequence(ops[op], op, dtype, [90])
    for lens in ([1] * 90, [89, 1], [1, 89], [16, 16, 58], [17, 3, 70]):
        for found, expected in zip(run_sequence(ops[op], op, dtype, lens), whole, strict=True):
            assert torch.equal(found, expected), lens
    for found, expected in zip(whole, run_sequence(SCHEMAS[op].reference, op, dtype, [90]), strict=True):
        allowed = 2e-5 if found.dtype == torch.float32 else tolerance(str(dtype).removeprefix("torch."))
        assert (found.float() - expected.float()).abs().max() <= allowed * expected.float().abs().max()


@pytest.mark.parametrize("op", STATE_OPS)
def test_results_do_not_depend_on_the_number_of_threads(ops, op, set_threads):
    found = []
    for threads in (1, 3):
        set_threads(threads)
        found.append(run_sequence(ops[op], op, torch.bfloat16, [30, 1]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_sizes_without_a_kernel_are_declined(ops):
    providers = {provider.op: provider for provider in StateOps(LOADED.library).providers()}
    [reason] = providers["causal_conv1d"].supports(OpCase("causal_conv1d", "float32", {"kernel_size": 17}))
    assert reason == "kernel_size 17 is larger than 16"
    facts = {"num_heads": 1, "head_dim": 64, "num_groups": 1, "state_size": 1024}
    [reason] = providers["ssd"].supports(OpCase("ssd", "bfloat16", facts))
    assert reason == "state_size 1024 is larger than 512"
    [reason] = providers["kda"].supports(OpCase("kda", "float64", {}))
    assert "float64" in reason
