"""Test cases of operations that update the states of sequences, and of the gated norm that follows them.

Slots that a call overwrites without reading them hold NaN before it, and so does the scratch row. Slots of no request
hold numbers that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mvllm.extension_api.testing import SCHEMAS
from mvllm_conformance.op_call import ROWS, OpCall, random_tensor

NUM_SLOTS = 7

PER_TOKEN = {"x", "dt", "b", "c", "q", "k", "v", "g", "beta"}
"""Parameters [T, ...] of the operations with a state."""


@dataclass(frozen=True)
class Slots:
    """Requests of a step.

    Attributes:
        lens: Tokens of each request.
        reads, writes: Its slots.
        num_padding: Tokens after the last request.
    """

    lens: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    num_padding: int = 0

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """query_start_loc, read_slots, write_slots and max_query_len."""
        starts = torch.tensor((0, *self.lens)).cumsum(0)
        rows = (torch.tensor(values, dtype=torch.int32) for values in (starts.tolist(), self.reads, self.writes))
        return (*rows, max(self.lens))  # type: ignore[return-value]


STEPS = {
    # In place, into another slot, a start, another reader of the same slot; the last is padding.
    "one token per request": Slots((1, 1, 1, 1, 0), (2, 0, -1, 0, -1), (2, 4, 1, 5, -1), num_padding=1),
    # A start of more than a chunk, one token, no token, two that read one slot; then padding.
    "prompts": Slots((70, 1, 0, 17, 2, 0), (-1, 3, 2, 4, 4, -1), (0, 3, 2, 5, 1, -1), num_padding=3),
    "one token and padding": Slots((1, 0), (3, -1), (6, -1), num_padding=2),
    "one chunk": Slots((64,), (3,), (3,)),
}


def has_state(op: str) -> bool:
    """Whether an operation updates states."""
    return bool(SCHEMAS[op].updates)


def compared(case: OpCall, found: Sequence[torch.Tensor], arguments: Sequence[Any]) -> list[torch.Tensor]:
    """What a call determines: results of tokens, whether those of padding are finite, and states of slots.

    Args:
        case: A case of an operation that updates states.
        found: The results of the call, on the host.
        arguments: Its arguments after the call; states are on the host.
    """
    parameters = list(SCHEMAS[case.op].parameters)
    num_tokens = int(case.make()[parameters.index("query_start_loc")][-1])
    states = [arguments[parameters.index(name)][:-1] for name in SCHEMAS[case.op].updates]
    finite = [torch.tensor(int(y[num_tokens:].isfinite().all())) for y in found]
    return [*(y[:num_tokens] for y in found), *finite, *states]


def state_dtypes(case: OpCall) -> set[torch.dtype]:
    """Dtypes of the states that a case updates."""
    schema = SCHEMAS[case.op]
    arguments = zip(schema.parameters, case.make(), strict=False) if schema.updates else ()
    return {argument.dtype for name, argument in arguments if name in schema.updates}


def one_request(case: OpCall, request: int, tokens: slice = slice(None), states: Sequence[torch.Tensor] = ()) -> OpCall:
    """The case with one of its requests, which has tokens.

    Args:
        tokens: Which of its tokens, at least one.
        states: The states after its tokens before these; none for the states of the case.
    """
    names = list(SCHEMAS[case.op].parameters)

    def make() -> tuple[Any, ...]:
        of = dict(zip(names, case.make(), strict=True))
        start, stop = of["query_start_loc"][request : request + 2].tolist()
        of.update({name: of[name][start:stop][tokens] for name in PER_TOKEN & of.keys()})
        count = len(range(stop - start)[tokens])
        of["query_start_loc"] = torch.tensor((0, count), dtype=torch.int32)
        of.update({name: of[name][request : request + 1] for name in ("read_slots", "write_slots")})
        if states:
            of.update({name: state.clone() for name, state in zip(SCHEMAS[case.op].updates, states, strict=True)})
            of["read_slots"] = of["write_slots"]
        of["max_query_len"] = count
        return tuple(of.values())

    return replace(case, make=make)


def state_cases(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    """The cases of one operation with a state in one compute dtype."""
    facts, arguments = _OPERATIONS[op]
    for number, slots in enumerate(STEPS.values()):
        for second, sizes in enumerate(facts):
            yield OpCall(op, sizes, partial(arguments, dtype, slots, bool(number + second & 1), *sizes.values()))


def _rows(dtype: torch.dtype, slots: Slots, *shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Random numbers for each token, as a strided view like a part of a fused projection."""
    tokens, size = sum(slots.lens) + slots.num_padding, torch.Size(shape).numel()
    return random_tensor(dtype, tokens, size + 16, seed=seed, scale=scale)[:, 8 : 8 + size].unflatten(-1, shape)


def _states(dtype: torch.dtype, slots: Slots, *shape: int) -> torch.Tensor:
    states = random_tensor(dtype, NUM_SLOTS + 1, *shape, seed=9)
    with_tokens = [write for write, count in zip(slots.writes, slots.lens, strict=True) if count]
    states[[NUM_SLOTS, *set(with_tokens).difference(slots.reads)]] = torch.nan
    return states


def _conv_arguments(dtype: torch.dtype, slots: Slots, plain: bool, channels: int, kernel_size: int) -> tuple[Any, ...]:
    return (
        _rows(dtype, slots, channels, seed=1),
        random_tensor(dtype, channels, kernel_size, seed=2, scale=0.5),
        None if plain else random_tensor(dtype, channels, seed=3),
        _states(dtype, slots, channels, kernel_size - 1),
        *slots.arguments(),
        "none" if plain else "silu",
    )


def _ssd_arguments(
    dtype: torch.dtype, slots: Slots, plain: bool, heads: int, head_dim: int, groups: int, state_size: int
) -> tuple[Any, ...]:
    return (
        _rows(dtype, slots, heads, head_dim, seed=1),
        _rows(dtype, slots, heads, seed=2),
        -torch.exp(random_tensor(torch.float32, heads, seed=3)),
        _rows(dtype, slots, groups, state_size, seed=4, scale=0.5),
        _rows(dtype, slots, groups, state_size, seed=5, scale=0.5),
        None if plain else random_tensor(torch.float32, heads, seed=6),
        None if plain else random_tensor(torch.float32, heads, seed=7),
        _states(torch.float32, slots, heads, head_dim, state_size),
        *slots.arguments(),
        *((0.0, float("inf")) if plain else (0.01, 1.5)),
    )


def _delta_rule_arguments(
    dtype: torch.dtype, slots: Slots, plain: bool, k_heads: int, v_heads: int, k_dim: int, v_dim: int
) -> tuple[Any, ...]:
    return _delta_arguments(dtype, slots, plain, k_heads, v_heads, k_dim, v_dim, (v_heads,))


def _kda_arguments(
    dtype: torch.dtype, slots: Slots, plain: bool, heads: int, k_dim: int, v_dim: int
) -> tuple[Any, ...]:
    return _delta_arguments(dtype, slots, plain, heads, heads, k_dim, v_dim, (heads, k_dim))


def _delta_arguments(
    dtype: torch.dtype,
    slots: Slots,
    plain: bool,
    k_heads: int,
    v_heads: int,
    k_dim: int,
    v_dim: int,
    decays: tuple[int, ...],
) -> tuple[Any, ...]:
    key_scale = 0.7 * k_dim**-0.5 if plain else 1.0  # without l2_norm keys longer than 1 would let the state grow
    return (
        _rows(dtype, slots, k_heads, k_dim, seed=1),
        _rows(dtype, slots, k_heads, k_dim, seed=2, scale=key_scale),
        _rows(dtype, slots, v_heads, v_dim, seed=3),
        -_rows(torch.float32, slots, *decays, seed=4).exp() / 4,
        _rows(dtype, slots, v_heads, seed=5).sigmoid().to(dtype if plain else torch.float32),
        _states(torch.float32, slots, v_heads, k_dim, v_dim),
        *slots.arguments(),
        k_dim**-0.5,
        not plain,
    )


_OPERATIONS: dict[str, tuple[tuple[dict[str, int], ...], Callable[..., tuple[Any, ...]]]] = {
    "causal_conv1d": (
        ({"channels": 72, "kernel_size": 4}, {"channels": 300, "kernel_size": 3}),
        _conv_arguments,
    ),
    "ssd": (
        (
            {"num_heads": 4, "head_dim": 16, "num_groups": 2, "state_size": 32},
            {"num_heads": 3, "head_dim": 20, "num_groups": 1, "state_size": 85},
        ),
        _ssd_arguments,
    ),
    "gated_delta_rule": (
        (
            {"num_k_heads": 2, "num_v_heads": 4, "k_head_dim": 16, "v_head_dim": 64},
            {"num_k_heads": 1, "num_v_heads": 3, "k_head_dim": 20, "v_head_dim": 43},
        ),
        _delta_rule_arguments,
    ),
    "kda": (
        (
            {"num_heads": 2, "k_head_dim": 16, "v_head_dim": 64},
            {"num_heads": 3, "k_head_dim": 20, "v_head_dim": 43},
        ),
        _kda_arguments,
    ),
}


_GATES = ((True, "silu", True), (False, "silu", True), (True, "sigmoid", True), (False, "silu", False))
"""norm_before_gate, activation, and whether there is a gate."""


def gated_rms_norm_cases(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    """The cases of `gated_rms_norm`."""
    for rows in ROWS:
        for width, group_size in ((128, 32), (100, 100)):
            for before, activation, gated in _GATES:
                sizes = {"width": width, "group_size": group_size}
                facts: dict[str, Any] = {**sizes, "norm_before_gate": before, "activation": activation}
                make = partial(_gated_norm_arguments, dtype, rows, gated, **facts)
                yield OpCall(op, facts, make)
                if activation == "silu" and before:
                    yield OpCall(op, facts, partial(_of_heads, make))


def _gated_norm_arguments(
    dtype: torch.dtype, rows: int, gated: bool, width: int, group_size: int, norm_before_gate: bool, activation: str
) -> tuple[Any, ...]:
    x, gate = random_tensor(dtype, rows, 2 * width).split(width, dim=1)
    weight = random_tensor(torch.float32 if norm_before_gate else dtype, width, seed=1)
    return x, gate if gated else None, weight, 1e-5, group_size, norm_before_gate, activation


def _of_heads(make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """The arguments with two heads in each row, which are apart in the gate only."""
    x, gate, *others = make()
    return torch.stack((x, gate), dim=1), torch.stack((gate, x, x), dim=1)[:, :2], *others
