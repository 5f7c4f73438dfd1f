"""The references of operations with a state, compared with transformers' functions, and with themselves in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import softplus
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from mvllm.ops.all_schemas import SCHEMAS

STATE_OPS = ("causal_conv1d", "ssd", "gated_delta_rule", "kda")
LONG = 150  # tokens: several chunks of every operation, and a part of one


def reference(name):
    return SCHEMAS[name].reference


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def one_sequence(tokens, read=0, write=0):
    """The last arguments of an operation, for one request."""
    return int32(0, tokens), int32(read), int32(write), tokens


def assert_near(found, expected):
    """Within 1e-5 of the largest value, in float32."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def with_scratch(state):
    """One slot, and a scratch row that must not be read."""
    return torch.cat((state, torch.full_like(state, torch.nan)))


@pytest.mark.parametrize("tokens", [1, 2, 3, LONG])
@pytest.mark.parametrize("activation", ["silu", "none"])
def test_convolution_equals_transformers(tokens, activation):
    x, weight, bias, tail = random(tokens, 12), random(12, 4, seed=1), random(12, seed=2), random(1, 12, 3, seed=3)
    state, expected_state = with_scratch(tail), tail.clone()
    name = None if activation == "none" else activation
    found = reference("causal_conv1d")(x, weight, bias, state, *one_sequence(tokens), activation)
    expected = mamba2.causal_conv1d_update(x.t()[None], expected_state, weight, bias, name)
    assert_near(found, expected[0].t())
    assert torch.equal(state[:1], expected_state)


def test_convolution_of_a_new_sequence_starts_with_zeros():
    x, weight = random(9, 12), random(12, 4, seed=1)
    state = torch.full((2, 12, 3), torch.nan)
    found = reference("causal_conv1d")(x, weight, None, state, *one_sequence(9, read=-1), "silu")
    assert_near(found, mamba2.causal_conv1d_fn(x.t()[None], weight, None, "silu")[0].t())
    assert torch.equal(state[0], x[-3:].t())


def ssd_arguments(tokens):
    heads, size, groups, states = 6, 8, 2, 16
    return {
        "x": random(tokens, heads, size),
        "dt": random(tokens, heads, seed=1),
        "a": -random(heads, seed=2).exp(),
        "b": random(tokens, groups, states, seed=3),
        "c": random(tokens, groups, states, seed=4),
        "d": random(heads, seed=5),
        "dt_bias": random(heads, seed=6),
        "state": with_scratch(random(1, heads, size, states, seed=7)),
    }


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.1, 1.0)])
@pytest.mark.parametrize("tokens", [1, 64, LONG])
def test_ssd_equals_transformers_for_prompts(tokens, limits):
    given = ssd_arguments(tokens)
    initial = given["state"][:1].clone()
    found = reference("ssd")(*given.values(), *one_sequence(tokens), *limits)
    expected, expected_state = mamba2.mamba2_chunk_scan(
        *(given[name][None] for name in ("x", "dt")),
        given["a"],
        *(given[name][None] for name in ("b", "c")),
        chunk_size=32,
        D=given["d"],
        dt_bias=given["dt_bias"],
        initial_states=initial,
        dt_softplus=True,
        dt_limit=limits,
        return_final_states=True,
    )
    assert_near(found, expected[0])
    assert_near(given["state"][0], expected_state[0])


def test_ssd_equals_transformers_for_one_token():
    given = ssd_arguments(5)
    heads, size, states = given["state"].shape[1:]
    state = random(6, heads, size, states, seed=8)
    expected_state = state[:5].clone()
    slots = torch.arange(5, dtype=torch.int32)
    step = torch.arange(6, dtype=torch.int32), slots, slots, 1
    found = reference("ssd")(*({**given, "state": state}).values(), *step, 0.0, float("inf"))
    expected = mamba2.mamba2_selective_state_update(
        expected_state,
        given["x"],
        given["dt"][..., None].expand(-1, -1, size),
        given["a"][:, None, None].expand(-1, size, states),
        given["b"],
        given["c"],
        given["d"][:, None].expand(-1, size),
        given["dt_bias"][:, None].expand(-1, size),
        dt_softplus=True,
    )
    assert_near(found, expected)
    assert_near(state[:5], expected_state)


def delta_arguments(op, tokens, k_heads=2, v_heads=2, k_dim=16, v_dim=24):
    decays = (tokens, v_heads, k_dim) if op == "kda" else (tokens, v_heads)
    return {
        "q": random(tokens, k_heads, k_dim),
        "k": random(tokens, k_heads, k_dim, seed=1),
        "v": random(tokens, v_heads, v_dim, seed=2),
        "g": -softplus(random(*decays, seed=3)),
        "beta": random(tokens, v_heads, seed=4).sigmoid(),
        "state": with_scratch(random(1, v_heads, k_dim, v_dim, seed=5)),
    }


DELTA_RULES = {
    "gated_delta_rule": (qwen3_next.torch_chunk_gated_delta_rule, qwen3_next.torch_recurrent_gated_delta_rule),
    "kda": (kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention),
}


@pytest.mark.parametrize("tokens", [1, 16, 17, LONG])
@pytest.mark.parametrize("which", [0, 1], ids=["chunks", "tokens"])
@pytest.mark.parametrize(("op", "v_heads"), [("gated_delta_rule", 2), ("gated_delta_rule", 6), ("kda", 2)])
def test_delta_rules_equal_transformers(op, v_heads, which, tokens):
    given = delta_arguments(op, tokens, v_heads=v_heads)
    initial = given["state"][:1].clone()
    found = reference(op)(*given.values(), *one_sequence(tokens), given["q"].shape[-1] ** -0.5, True)
    expected, expected_state = DELTA_RULES[op][which](
        *(given[name][None] for name in ("q", "k", "v")),
        g=given["g"][None],
        beta=given["beta"][None],
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert_near(found, expected[0])
    assert_near(given["state"][0], expected_state[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["qwen3_next", "kimi", "mamba2", "falcon_before", "falcon_after", "no gate"])
def test_gated_norms_equal_transformers(case, dtype):
    width, group = 48, 48 if case in ("qwen3_next", "kimi") else 12
    x, gate = random(5, width).to(dtype), random(5, width, seed=1).to(dtype)
    module, before, activation = {
        "qwen3_next": (qwen3_next.Qwen3NextRMSNormGated(width, eps=1e-5), True, "silu"),
        "kimi": (kimi.KimiLinearRMSNormGated(width, eps=1e-5), True, "sigmoid"),
        "mamba2": (mamba2.MambaRMSNormGated(width, group, eps=1e-5), False, "silu"),
        "falcon_before": (FalconH1RMSNormGated(width, eps=1e-5, n_groups=4, norm_before_gate=True), True, "silu"),
        "falcon_after": (FalconH1RMSNormGated(width, eps=1e-5, n_groups=4, norm_before_gate=False), False, "silu"),
        "no gate": (mamba2.MambaRMSNormGated(width, group, eps=1e-5), False, "silu"),
    }[case]
    torch.nn.init.normal_(module.weight)
    module.to(dtype)
    if case == "no gate":
        gate = None
    found = reference("gated_rms_norm")(x, gate, module.weight, 1e-5, group, before, activation)
    allowed = 1e-6 if dtype == torch.float32 else 2**-6  # they round to bfloat16 in between, some of them twice
    torch.testing.assert_close(found, module(x, gate), rtol=allowed, atol=allowed / 4)


CUTS = ([1] * LONG, [LONG - 1, 1], [1, LONG - 1], [64, 64, LONG - 128], [17, 3, 1, 80, LONG - 101])


@pytest.mark.parametrize("op", STATE_OPS)
def test_the_state_does_not_depend_on_how_a_prompt_is_cut(op):
    """Each step writes another slot than it reads, as when states are kept for other requests."""
    if op == "causal_conv1d":
        weight, bias, tail = random(12, 4, seed=1), random(12, seed=2), random(12, 3, seed=3)
        per_token, middle, last = {"x": random(LONG, 12)}, (weight, bias), ("silu",)
    elif op == "ssd":
        given = ssd_arguments(LONG)
        tail = given["state"][0]
        per_token = {name: given[name] for name in ("x", "dt", "a", "b", "c")}
        middle, last = (given["d"], given["dt_bias"]), (0.0, float("inf"))
    else:
        given = delta_arguments(op, LONG)
        tail = given["state"][0]
        per_token = {name: given[name] for name in ("q", "k", "v", "g", "beta")}
        middle, last = (), (0.25, True)

    def run(lens):
        state = torch.full((3, *tail.shape), torch.nan)
        state[0], slot, results = tail, 0, []
        for start, stop in pairwise([0, *torch.tensor(lens).cumsum(0).tolist()]):
            tokens = [value if name == "a" else value[start:stop] for name, value in per_token.items()]
            step = one_sequence(stop - start, read=slot, write=1 - slot)
            results.append(reference(op)(*tokens, *middle, state, *step, *last))
            slot = 1 - slot
        return torch.cat(results), state[slot]

    whole = run([LONG])
    for lens in CUTS:
        for found, expected in zip(run(lens), whole, strict=True):
            assert_near(found, expected)


@pytest.mark.parametrize("op", ["ssd", "gated_delta_rule", "kda"])
def test_a_decay_to_nothing_does_not_blur_the_next_tokens(op):
    """Differences between sums of a chunk's decays would lose the small decays after a very large one."""
    tokens = 12
    if op == "ssd":
        given = ssd_arguments(tokens)
        given["dt"][4] = 4000.0
        last = (0.0, float("inf"))
    else:
        given = delta_arguments(op, tokens)
        given["g"][4] = -30000.0
        last = (0.25, True)
    whole = reference(op)(*given.values(), *one_sequence(tokens), *last)
    assert whole.isfinite().all()
    # The decay leaves nothing of the tokens before it, so the sequence may as well start with it.
    per_token = {name for name in given if name not in ("a", "d", "dt_bias", "state")}
    alone = [value[4:] if name in per_token else value for name, value in given.items()]
    found = reference(op)(*alone, *one_sequence(tokens - 4, read=-1), *last)
    torch.testing.assert_close(whole[4:], found, rtol=1e-6, atol=1e-6 * float(found.abs().max()))
