"""Test cases of `quantized_moe` and `quantized_ungated_moe`, in terms of those of the linear operations whose weights
the experts have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mvllm.extension_api.testing import UNGATED_ACTIVATIONS, clamped_gate, ungated_activation
from mvllm.plugin_api import BlockQuantizedWeight, ExpertWeight, Float8Weight, QuantizedWeight
from mvllm_conformance.block_quantized_cases import (
    block_quantized_weight,
    exact_block_quantized,
    rows_of_block_quantized,
)
from mvllm_conformance.op_call import ROWS, OpCall, random_tensor
from mvllm_conformance.quantized_weight_cases import (
    exact_float8,
    exact_quantized,
    float8_weight,
    quantized_weight,
    rows_of_float8,
    rows_of_quantized,
)

NUM_EXPERTS, TOP_K = 4, 2
ALPHA, LIMIT = 1.702, 1.5
FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max

_INTEGERS = (  # bits, group_size (None for a row), symmetric, int8_activations
    (8, None, True, True),
    (8, None, True, False),
    (4, 32, False, True),
    (4, 32, False, False),
    (4, 64, True, False),
)
_FLOAT8 = ((None, None, "static"), (1, None, "dynamic"), (32, 32, "dynamic"), (32, 32, "floats"))
_BLOCKS = (  # hidden_size, formats of gate and up, intermediate_size, format of down
    (64, ("q4_0", "q4_0"), 96, "q4_0"),
    (64, ("q8_0", "q8_0"), 96, "q8_0"),
    (64, ("mxfp4", "mxfp4"), 96, "mxfp4"),
    (96, ("q4_1", "q5_0"), 64, "iq4_nl"),
    (256, ("q4_k", "q4_k"), 256, "q6_k"),
    (256, ("q5_k", "q4_k"), 32, "q5_1"),
    (256, ("q3_k", "iq4_xs"), 256, "q4_k"),
)


def quantized_moe_cases(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    """Cases of `quantized_moe`, with and without biases and clamped gates."""
    for rows in ROWS:
        for clamped in (False, True) if rows == max(ROWS) else (rows == 3,):
            yield from _integer_cases(op, dtype, rows, clamped)
            yield from _float8_cases(op, dtype, rows, clamped)
            yield from _block_cases(op, dtype, rows, clamped)


def _integer_cases(op: str, dtype: torch.dtype, rows: int, clamped: bool) -> Iterator[OpCall]:
    hidden, size = 64, 80  # the last group has fewer columns
    for bits, group_size, symmetric, int8_activations in _INTEGERS:
        upper, lower = (
            {
                "bits": bits,
                "group_size": min(group_size or columns, columns),
                "symmetric": symmetric,
                "int8_activations": int8_activations,
            }
            for columns in (hidden, size)
        )

        def experts(upper: dict[str, Any] = upper, lower: dict[str, Any] = lower) -> Iterator[tuple[Any, Any]]:
            for e in range(NUM_EXPERTS):
                of_rows = {**upper, "in_features": hidden}, {**lower, "in_features": size}
                yield quantized_weight(of_rows[0], 2 * size, e), quantized_weight(of_rows[1], hidden, e + 9)

        x = partial(rows_of_quantized, dtype, rows, hidden)
        yield _case(op, "quantized_linear", (upper, lower), (hidden, size), clamped, x, experts)


def _float8_cases(op: str, dtype: torch.dtype, rows: int, clamped: bool) -> Iterator[OpCall]:
    hidden, size = 64, 96
    for block_rows, block_columns, inputs in _FLOAT8:
        upper, lower = (
            {
                "block_rows": min(block_rows or out, out),
                "block_columns": min(block_columns or columns, columns),
                "inputs": inputs,
            }
            for out, columns in ((2 * size, hidden), (hidden, size))
        )

        def experts(upper: dict[str, Any] = upper, lower: dict[str, Any] = lower) -> Iterator[tuple[Any, Any]]:
            for e in range(NUM_EXPERTS):
                of_rows = {**upper, "out_features": 2 * size, "in_features": hidden}
                yield (
                    float8_weight(of_rows, e),
                    float8_weight({**lower, "out_features": hidden, "in_features": size}, e + 9),
                )

        x = partial(rows_of_float8, dtype, rows, {**upper, "in_features": hidden})
        yield _case(op, "float8_linear", (upper, lower), (hidden, size), clamped, x, experts)


def _block_cases(op: str, dtype: torch.dtype, rows: int, clamped: bool) -> Iterator[OpCall]:
    for hidden, formats, size, of_down in _BLOCKS:
        for int8 in (False, True):

            def experts(
                formats: tuple[str, str] = formats,
                of_down: str = of_down,
                sizes: tuple[int, int] = (hidden, size),
                int8: bool = int8,
            ) -> Iterator[tuple[Any, Any]]:
                hidden, size = sizes
                for e in range(NUM_EXPERTS):
                    yield (
                        block_quantized_weight(tuple((name, size) for name in formats), hidden, int8, seed=2 * e),
                        block_quantized_weight(((of_down, hidden),), size, int8, seed=50 + e),
                    )

            facts = (
                {"formats": formats, "int8_activations": int8},
                {"formats": (of_down,), "int8_activations": int8},
            )
            x = partial(rows_of_block_quantized, dtype, rows, hidden)
            yield _case(op, "block_quantized_linear", facts, (hidden, size), clamped, x, experts)


def _case(
    op: str,
    linear: str,
    facts: tuple[dict[str, Any], dict[str, Any]],
    sizes: tuple[int, int],
    clamped: bool,
    make_x: Callable[[], torch.Tensor],
    experts: Callable[[], Iterator[tuple[ExpertWeight, ExpertWeight]]],
) -> OpCall:
    hidden, size = sizes

    def make() -> tuple[Any, ...]:
        x = make_x()
        dtype = x.dtype
        gate_up, down = zip(*experts(), strict=True)
        biases = (
            random_tensor(dtype, NUM_EXPERTS, 2 * size, seed=4) if clamped else None,
            random_tensor(dtype, NUM_EXPERTS, hidden, seed=5) if clamped else None,
        )
        gate = (ALPHA, LIMIT) if clamped else (None, None)
        return x, gate_up, biases[0], down, biases[1], *_routing(len(x)), *gate

    of_case = {
        "num_experts": NUM_EXPERTS,
        "top_k": TOP_K,
        "hidden_size": hidden,
        "intermediate_size": size,
        "bias": clamped,
        "clamped": clamped,
        "linear": linear,
        "gate_up": tuple(sorted(facts[0].items())),
        "down": tuple(sorted(facts[1].items())),
    }
    return OpCall(op, of_case, make, weight=(1, 3))


_UNGATED_BLOCKS = (  # hidden_size, format of up, intermediate_size, format of down
    (64, "q8_0", 96, "q4_0"),
    (256, "q4_k", 256, "q6_k"),
)


def quantized_ungated_moe_cases(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    """Cases of `quantized_ungated_moe` with each activation, with integers, 8-bit floats and blocks."""
    for rows in ROWS:
        for activation in UNGATED_ACTIVATIONS if rows == max(ROWS) else ("relu_squared",):
            yield from _ungated_cases(op, dtype, rows, activation)


def _ungated_cases(op: str, dtype: torch.dtype, rows: int, activation: str) -> Iterator[OpCall]:
    integers = {"bits": 4, "group_size": 32, "symmetric": False, "int8_activations": False}
    yield _ungated_case(
        *(op, "quantized_linear", (integers, integers), (64, 80), activation),
        partial(rows_of_quantized, dtype, rows, 64),
        lambda e: (
            quantized_weight({**integers, "in_features": 64}, 80, e),
            quantized_weight({**integers, "in_features": 80}, 64, e + 9),
        ),
    )
    upper, lower = ({"block_rows": 1, "block_columns": columns, "inputs": "dynamic"} for columns in (64, 96))
    yield _ungated_case(
        *(op, "float8_linear", (upper, lower), (64, 96), activation),
        partial(rows_of_float8, dtype, rows, {**upper, "in_features": 64}),
        lambda e: (
            float8_weight({**upper, "out_features": 96, "in_features": 64}, e),
            float8_weight({**lower, "out_features": 64, "in_features": 96}, e + 9),
        ),
    )
    for hidden, of_up, size, of_down in _UNGATED_BLOCKS:
        for int8 in (False, True):
            facts = tuple({"formats": (name,), "int8_activations": int8} for name in (of_up, of_down))

            x = partial(rows_of_block_quantized, dtype, rows, hidden)
            experts = partial(_ungated_blocks, (hidden, size), (of_up, of_down), int8)
            yield _ungated_case(op, "block_quantized_linear", facts, (hidden, size), activation, x, experts)


def _ungated_blocks(
    sizes: tuple[int, int], formats: tuple[str, str], int8: bool, expert: int
) -> tuple[ExpertWeight, ExpertWeight]:
    hidden, size = sizes
    return (
        block_quantized_weight(((formats[0], size),), hidden, int8, seed=expert),
        block_quantized_weight(((formats[1], hidden),), size, int8, seed=50 + expert),
    )


def _ungated_case(
    op: str,
    linear: str,
    facts: tuple[dict[str, Any], ...],
    sizes: tuple[int, int],
    activation: str,
    make_x: Callable[[], torch.Tensor],
    expert: Callable[[int], tuple[ExpertWeight, ExpertWeight]],
) -> OpCall:
    def make() -> tuple[Any, ...]:
        x = make_x()
        up, down = zip(*(expert(e) for e in range(NUM_EXPERTS)), strict=True)
        return x, up, down, *_routing(len(x)), activation

    of_case = {
        "num_experts": NUM_EXPERTS,
        "top_k": TOP_K,
        "hidden_size": sizes[0],
        "intermediate_size": sizes[1],
        "activation": activation,
        "linear": linear,
        "up": tuple(sorted(facts[0].items())),
        "down": tuple(sorted(facts[1].items())),
    }
    return OpCall(op, of_case, make, weight=(1, 2))


def _routing(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and weights of each token's experts."""
    ids = torch.stack([(torch.arange(rows) + k) % NUM_EXPERTS for k in range(TOP_K)], dim=1)
    return ids, torch.softmax(random_tensor(torch.float32, rows, TOP_K, seed=3), dim=-1)


def inner_steps(case: OpCall, dtype: str) -> float:
    """Allowed difference, relative to the largest value of the result, from rounding inner elements to 8 bits.

    They are not exact, so that one near the middle of two numbers may become either of them.
    """
    down = dict(case.facts["down"])
    if case.facts["linear"] == "float8_linear":
        return 0.0 if down["inputs"] == "floats" else 0.1
    rounds = down["int8_activations"] and (case.facts["linear"] == "quantized_linear" or dtype != "float32")
    return 0.02 if rounds else 0.0


def with_unrounded_inputs(case: OpCall) -> OpCall:
    """The case with weights of quantized blocks without `int8_activations`; unchanged if it has none."""

    def unrounded(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(unrounded(item) for item in argument)
        return replace(argument, int8_activations=False) if isinstance(argument, BlockQuantizedWeight) else argument

    return replace(case, make=lambda: unrounded(case.make()))


def exact_quantized_moe(
    x: torch.Tensor,
    gate_up: tuple[ExpertWeight, ...],
    gate_up_bias: torch.Tensor | None,
    down: tuple[ExpertWeight, ...],
    down_bias: torch.Tensor | None,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    alpha: float | None,
    limit: float | None,
) -> torch.Tensor:
    """The exact result in float64, token by token."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for e, share in zip(expert_ids[token].tolist(), expert_weights[token].tolist(), strict=True):
            bias = None if gate_up_bias is None else gate_up_bias[e]
            gate, up = _linear(x[token, None].double(), gate_up[e], bias, x.dtype).chunk(2, dim=1)
            if alpha is None or limit is None:
                inner = torch.nn.functional.silu(gate) * up
            else:
                inner = clamped_gate(gate, up, alpha, limit)
            out = _linear(inner, down[e], None if down_bias is None else down_bias[e], x.dtype)
            total[token] += share * out[0]
    return total


def exact_quantized_ungated_moe(
    x: torch.Tensor,
    up: tuple[ExpertWeight, ...],
    down: tuple[ExpertWeight, ...],
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """The exact result in float64, token by token."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for e, share in zip(expert_ids[token].tolist(), expert_weights[token].tolist(), strict=True):
            inner = ungated_activation(_linear(x[token, None].double(), up[e], None, x.dtype), activation)
            total[token] += share * _linear(inner, down[e], None, x.dtype)[0]
    return total


def _linear(x: torch.Tensor, weight: ExpertWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The exact product of float64 inputs, of an operation with this compute dtype."""
    if isinstance(weight, QuantizedWeight):
        return exact_quantized(x, weight, bias)
    if isinstance(weight, Float8Weight):
        return exact_float8(_rounded_to_float8(x, weight), weight, bias)
    return exact_block_quantized(x, weight, bias, rounds=weight.int8_activations and dtype != torch.float32)


def _rounded_to_float8(x: torch.Tensor, weight: Float8Weight) -> torch.Tensor:
    if weight.inputs == "floats":
        return x
    if weight.inputs == "static":
        assert weight.input_scale is not None, "static inputs have a scale"
        scale = weight.input_scale.double()
        return (x / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).double() * scale
    runs = []
    for run in x.split(weight.block_columns, dim=1):
        scale = run.abs().amax(dim=1, keepdim=True) / FLOAT8_MAX
        runs.append((run / scale.where(scale > 0, 1.0)).to(torch.float8_e4m3fn).double() * scale)
    return torch.cat(runs, dim=1)
