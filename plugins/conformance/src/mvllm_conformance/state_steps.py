"""Test cases for operations on sequence states: tensors of a step, and a harness that runs steps on the device.

sequences on the host ──cut into steps──> StateHarness (backend and operation of the platform)
         └──one token at a time──> the reference on the host, which is exact
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mvllm.extension_api.testing import SCHEMAS, OpTable, checked_state_backend, torch_dtype
from mvllm.plugin_api import DeviceRuntime, StateArguments, StateLayout, StateSpec, StateTensor, StepKind
from mvllm_conformance.op_call import random_tensor
from mvllm_conformance.platform_under_test import PlatformUnderTest


@dataclass(frozen=True)
class StateCase:
    """One operation with fixed sizes.

    Attributes:
        op: Name of the operation.
        dtype: Compute dtype by name.
        facts: The facts with which layers resolve it.
        spec: The state of a sequence.
        per_token: Indices of the arguments that have a row for each token.
        draw: Makes the arguments before the state, for a number of tokens and a seed, on the host.
        last: The arguments after `max_query_len`.
    """

    op: str
    dtype: str
    facts: dict[str, Any]
    spec: StateSpec
    per_token: tuple[int, ...]
    draw: Callable[[int, int], list[torch.Tensor | None]]
    last: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.op} {self.facts} in {self.dtype}"


def step_cases(op: str, dtype: str) -> list[StateCase]:
    """The cases of an operation in one compute dtype; empty if it has no state."""
    makers = {
        "causal_conv1d": _causal_conv1d,
        "ssd": _ssd,
        "gated_delta_rule": _gated_delta_rule,
        "kda": _kda,
    }
    return makers[op](dtype) if op in makers else []


def tolerance(dtype: str) -> float:
    """Largest allowed difference relative to the largest value: sums over a sequence, and roundings of the result."""
    return 1e-4 if dtype == "float32" else 8 * torch.finfo(torch_dtype(dtype)).eps


def step_by_step(case: StateCase, arguments: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [T, ...] and the final state of one sequence, from the reference with one token at a time.

    Args:
        arguments: From `case.draw`.
    """
    (tensor,) = case.spec.tensors
    state = torch.zeros((2, *tensor.shape), dtype=torch_dtype(tensor.dtype))
    num_tokens = next(len(arguments[i]) for i in case.per_token)  # type: ignore[arg-type]
    results = []
    for t in range(num_tokens):
        slots = torch.zeros(1, dtype=torch.int32)
        read = slots if t else slots - 1
        bounds = torch.tensor([0, 1], dtype=torch.int32)
        token = rows_of(case, arguments, slice(t, t + 1))
        results.append(SCHEMAS[case.op].reference(*token, state, bounds, read, slots, 1, *case.last))
    return torch.cat(results), state[0]


def rows_of(
    case: StateCase, arguments: Sequence[torch.Tensor | None], tokens: slice
) -> tuple[torch.Tensor | None, ...]:
    """The arguments for some of the tokens."""
    return tuple(x[tokens] if i in case.per_token and x is not None else x for i, x in enumerate(arguments))


@dataclass(frozen=True)
class Piece:
    """The tokens of one sequence in a step.

    Attributes:
        sequence: Index of the sequence.
        tokens: Which of its tokens.
        read, write: State slots.
    """

    sequence: int
    tokens: slice
    read: int
    write: int


def make_layout(pieces: Sequence[Piece], *, padding: int = 0, padding_requests: int = 0) -> StateLayout:
    """The layout of a step, with its device arrays on the host.

    Args:
        padding: Tokens of padding at the end.
        padding_requests: Requests of padding at the end.
    """
    lengths = [piece.tokens.stop - piece.tokens.start for piece in pieces]
    num_requests, total = len(pieces) + padding_requests, sum(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths), [total] * padding_requests]).astype(np.int32)
    spare = [-1] * padding_requests
    read = np.array([piece.read for piece in pieces] + spare, dtype=np.int32)
    write = np.array([piece.write for piece in pieces] + spare, dtype=np.int32)
    longest = max(lengths)
    return StateLayout(
        num_requests,
        total + padding,
        longest,
        starts,
        read,
        write,
        torch.from_numpy(starts),
        torch.from_numpy(read),
        torch.from_numpy(write),
        kind=StepKind.DECODE if longest == 1 else StepKind.MIXED,
        num_decodes=next((i for i, length in enumerate(lengths) if length != 1), len(lengths)),
    )


class StateHarness:
    """States on the device, and steps of one operation over them.

    Args:
        subject: The platform.
        runtime: The bound device.
        case: The operation.
        num_slots: State slots.

    Attributes:
        backend, state: The platform's backend, and the states of one layer that it has allocated.
        provider: Name of the operation's provider.
    """

    def __init__(self, subject: PlatformUnderTest, runtime: DeviceRuntime, case: StateCase, num_slots: int) -> None:
        self.case, self.runtime = case, runtime
        self.backend = checked_state_backend(subject.platform, case.spec)
        self.state = self.backend.allocate(num_slots, runtime.device)
        resolved = OpTable.resolve(subject.platform.ops()).get(case.op, torch_dtype(case.dtype), **case.facts)
        self._function, self.provider = resolved.function, resolved.provider

    def metadata(self, layout: StateLayout) -> StateArguments:
        """The backend's metadata of a step whose device arrays are on the host."""
        for name in ("query_start_loc", "read_slots", "write_slots"):
            setattr(layout, f"{name}_device", self.runtime.from_numpy(getattr(layout, name)))
        return self.backend.build_metadata(layout)

    def run(
        self,
        sequences: Sequence[Sequence[torch.Tensor | None]],
        pieces: Sequence[Piece],
        *,
        padding: int = 0,
        padding_requests: int = 0,
    ) -> list[torch.Tensor]:
        """Runs a step; the results of each piece on the host, and last those of the padding.

        Args:
            sequences: Arguments of each sequence, from `case.draw`. All have the same weights.
        """
        case = self.case
        parts = [rows_of(case, sequences[piece.sequence], piece.tokens) for piece in pieces]
        arguments: list[torch.Tensor | None] = []
        for i, first in enumerate(parts[0]):
            if first is None or i not in case.per_token:
                arguments.append(None if first is None else self.runtime.to_device(first.clone()))
                continue
            rows = [part[i] for part in parts] + [torch.ones((padding, *first.shape[1:]), dtype=first.dtype)]
            arguments.append(self.runtime.to_device(torch.cat(rows)))  # type: ignore[arg-type]
        metadata = self.metadata(make_layout(pieces, padding=padding, padding_requests=padding_requests))
        step = metadata.query_start_loc, metadata.read_slots, metadata.write_slots, metadata.max_query_len
        with self.runtime.inference_mode():
            result = self._function(*arguments, self.state[0], *step, *case.last)
        self.runtime.step_mark()
        sizes = [piece.tokens.stop - piece.tokens.start for piece in pieces] + [padding]
        return list(self.runtime.to_host(result).wait().split(sizes))

    def contents(self) -> torch.Tensor:
        """All slots of the state but the scratch memory, on the host: [num_slots, ...]."""
        return self.runtime.to_host(self.state[0]).wait().clone()[:-1]


def _causal_conv1d(dtype: str) -> list[StateCase]:
    def case(channels: int, kernel_size: int, *, bias: bool, activation: str) -> StateCase:
        def draw(num_tokens: int, seed: int) -> list[torch.Tensor | None]:
            of = torch_dtype(dtype)
            return [
                random_tensor(of, num_tokens, channels, seed=100 + seed),
                random_tensor(of, channels, kernel_size, seed=1, scale=kernel_size**-0.5),
                random_tensor(of, channels, seed=2) if bias else None,
            ]

        spec = StateSpec((StateTensor((channels, kernel_size - 1), dtype),))
        facts = {"channels": channels, "kernel_size": kernel_size}
        return StateCase("causal_conv1d", dtype, facts, spec, (0,), draw, (activation,))

    return [case(96, 4, bias=True, activation="silu"), case(64, 3, bias=False, activation="none")]


def _ssd(dtype: str) -> list[StateCase]:
    def case(num_heads: int, head_dim: int, num_groups: int, state_size: int) -> StateCase:
        def draw(num_tokens: int, seed: int) -> list[torch.Tensor | None]:
            of = torch_dtype(dtype)
            return [
                random_tensor(of, num_tokens, num_heads, head_dim, seed=100 + seed),
                random_tensor(of, num_tokens, num_heads, seed=200 + seed),
                -random_tensor(torch.float32, num_heads, seed=1).exp(),
                random_tensor(of, num_tokens, num_groups, state_size, seed=300 + seed, scale=state_size**-0.5),
                random_tensor(of, num_tokens, num_groups, state_size, seed=400 + seed),
                random_tensor(torch.float32, num_heads, seed=2),
                random_tensor(torch.float32, num_heads, seed=3) - 3,
            ]

        spec = StateSpec((StateTensor((num_heads, head_dim, state_size), "float32"),))
        facts = {"num_heads": num_heads, "head_dim": head_dim, "num_groups": num_groups, "state_size": state_size}
        return StateCase("ssd", dtype, facts, spec, (0, 1, 3, 4), draw, (0.0, float("inf")))

    return [case(4, 64, 2, 32), case(2, 32, 1, 64)]


def _gated_delta_rule(dtype: str) -> list[StateCase]:
    def case(num_k_heads: int, num_v_heads: int, head_dim: int) -> StateCase:
        def draw(num_tokens: int, seed: int) -> list[torch.Tensor | None]:
            of = torch_dtype(dtype)
            decays = random_tensor(torch.float32, num_tokens, num_v_heads, seed=400 + seed)
            return [
                *(random_tensor(of, num_tokens, num_k_heads, head_dim, seed=100 * i + seed) for i in (1, 2)),
                random_tensor(of, num_tokens, num_v_heads, head_dim, seed=300 + seed),
                -0.1 * decays.exp(),
                random_tensor(of, num_tokens, num_v_heads, seed=500 + seed).sigmoid(),
            ]

        spec = StateSpec((StateTensor((num_v_heads, head_dim, head_dim), "float32"),))
        facts = {
            "num_k_heads": num_k_heads,
            "num_v_heads": num_v_heads,
            "k_head_dim": head_dim,
            "v_head_dim": head_dim,
        }
        last = (head_dim**-0.5, True)
        return StateCase("gated_delta_rule", dtype, facts, spec, (0, 1, 2, 3, 4), draw, last)

    return [case(2, 4, 64), case(2, 2, 32)]


def _kda(dtype: str) -> list[StateCase]:
    num_heads, head_dim = 2, 64

    def draw(num_tokens: int, seed: int) -> list[torch.Tensor | None]:
        of = torch_dtype(dtype)
        decays = random_tensor(torch.float32, num_tokens, num_heads, head_dim, seed=400 + seed)
        return [
            *(random_tensor(of, num_tokens, num_heads, head_dim, seed=100 * i + seed) for i in (1, 2, 3)),
            -0.1 * decays.exp(),
            random_tensor(of, num_tokens, num_heads, seed=500 + seed).sigmoid(),
        ]

    spec = StateSpec((StateTensor((num_heads, head_dim, head_dim), "float32"),))
    facts = {"num_heads": num_heads, "k_head_dim": head_dim, "v_head_dim": head_dim}
    return [StateCase("kda", dtype, facts, spec, (0, 1, 2, 3, 4), draw, (head_dim**-0.5, True))]
