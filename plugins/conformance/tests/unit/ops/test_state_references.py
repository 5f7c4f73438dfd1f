"""The references of operations with a state, compared with loops over tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import silu, softplus

from mvllm.ops.all_schemas import SCHEMAS
from mvllm_conformance.op_cases import exact, op_calls, tolerance
from mvllm_conformance.state_cases import compared

STATE_OPS = ("causal_conv1d", "ssd", "gated_delta_rule", "kda")


def reference(name):
    return SCHEMAS[name].reference


def one_by_one(case):
    """The case by the formulas of the docstrings, one token after the other, in float64."""
    of = dict(zip(SCHEMAS[case.op].parameters, case.make(), strict=True))
    of = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in of.items()}
    state, starts = of["state"].clone(), of["query_start_loc"].tolist()
    results = []
    for (start, stop), read, write in zip(pairwise(starts), of["read_slots"], of["write_slots"], strict=True):
        s = torch.zeros_like(state[0]) if read < 0 else state[read].clone()
        for t in range(start, stop):
            y, s = FORMULAS[case.op](of, t, s)
            results.append(y)
        if stop > start and write >= 0:
            state[write] = s
    return [torch.stack(results), torch.tensor(1), state[:-1]]


def conv_formula(of, t, s):
    window = torch.cat((s, of["x"][t][:, None]), dim=1)
    y = (window * of["weight"]).sum(dim=1) + (0 if of["bias"] is None else of["bias"])
    return silu(y) if of["activation"] == "silu" else y, window[:, 1:]


def ssd_formula(of, t, s):
    per_group = of["x"].shape[1] // of["b"].shape[1]
    b, c = (of[name][t].repeat_interleave(per_group, dim=0) for name in ("b", "c"))
    dt = of["dt"][t] + (0 if of["dt_bias"] is None else of["dt_bias"])
    dt = softplus(dt).clamp(of["dt_min"], of["dt_max"])
    s = torch.exp(dt * of["a"])[:, None, None] * s + dt[:, None, None] * of["x"][t][:, :, None] * b[:, None, :]
    y = (s * c[:, None, :]).sum(dim=-1)
    return y if of["d"] is None else y + of["d"][:, None] * of["x"][t], s


def delta_formula(of, t, s):
    per_head = of["v"].shape[1] // of["k"].shape[1]
    q, k = (of[name][t].repeat_interleave(per_head, dim=0) for name in ("q", "k"))
    if of["l2_norm"]:
        q, k = (x / (x.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = of["g"][t]
    s = s * torch.exp(g if g.dim() == 2 else g[:, None])[:, :, None]
    correction = of["beta"][t][:, None] * (of["v"][t] - torch.einsum("hk,hkv->hv", k, s))
    s = s + k[:, :, None] * correction[:, None, :]
    return of["scale"] * torch.einsum("hk,hkv->hv", q, s), s


FORMULAS = {"causal_conv1d": conv_formula, "ssd": ssd_formula, "gated_delta_rule": delta_formula, "kda": delta_formula}


@pytest.mark.parametrize("op", STATE_OPS)
def test_requests_of_a_step_are_computed_one_token_after_the_other(op):
    for case in op_calls(op, "float64"):
        expected = one_by_one(case)
        for dtype, found in (("float64", exact(case)), ("float32", in_float32(op, case))):
            allowed = 1e-11 if dtype == "float64" else tolerance(dtype, case)
            for one, other in zip(found, expected, strict=True):
                assert (one - other).abs().max() <= allowed * other.abs().max(), case


def in_float32(op, case):
    arguments = [
        value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in case.make()
    ]
    return compared(case, [reference(op)(*arguments)], arguments)


@pytest.mark.parametrize("op", STATE_OPS)
def test_steps_of_one_token_do_not_read_the_device(op):
    case = next(iter(op_calls(op, "bfloat16")))
    arguments = case.make()
    on_meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments]
    found, expected = reference(op)(*on_meta), reference(op)(*arguments)  # a value on the meta device cannot be read
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
