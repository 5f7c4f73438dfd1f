"""Operations of layers with a state, with the compiled kernels: each state is read and written once per call.

Kernels advance a state token by token in float32, so a request's result and state have the same bits however its
tokens are cut into steps, and whatever the other requests are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from mvllm.plugin_api import OpCase, OpProvider
from mvllm_cpu import workspace
from mvllm_cpu.ops import PROVIDER, rows_of, supports
from mvllm_cpu.paged_attention import DTYPE_CODES
from mvllm_cpu.recording import Kernel

LARGEST = {"kernel_size": 16, "state_size": 512}
"""Largest sizes of the kernels, by fact: `MAX_CONV_KERNEL` and `MAX_STATE_SIZE` of csrc/state.h."""

Slots = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
"""query_start_loc, read_slots, write_slots and max_query_len of an operation."""


def supports_sizes(case: OpCase) -> list[str]:
    """Reasons why the kernels do not take a case."""
    reasons = supports(case)
    for fact, largest in LARGEST.items():
        if case.facts.get(fact, 0) > largest:
            reasons.append(f"{fact} {case.facts[fact]} is larger than {largest}")
    return reasons


class StateOps:
    """The operations, bound to the opened library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, length, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
        rows = (pointer, length)
        slots = (pointer, pointer, pointer, length, length)  # of the step, its requests and tokens
        conv = (*rows, pointer, pointer, pointer, pointer, *slots, length, length, number, number)
        self._causal_conv1d = Kernel(library, "mvllm_cpu_causal_conv1d", conv)
        ssd = (*rows, *rows, pointer, *rows, *rows, pointer, pointer, pointer, pointer, *slots)
        self._ssd = Kernel(library, "mvllm_cpu_ssd", (*ssd, length, length, length, length, real, real, number))
        delta = (*rows, *rows, *rows, *rows, *rows, pointer, pointer, *slots, length, length, length, length)
        self._delta_rule = Kernel(library, "mvllm_cpu_gated_delta_rule", (*delta, real, number, number, number, number))
        heads = (*rows, length)
        norm = (*heads, *heads, pointer, pointer, length, length, length, length, real, number, number, number, number)
        self._gated_rms_norm = Kernel(library, "mvllm_cpu_gated_rms_norm", norm)

    def providers(self) -> Sequence[OpProvider]:
        """One per operation."""
        functions = (self.causal_conv1d, self.ssd, self.gated_delta_rule, self.kda, self.gated_rms_norm)
        return [OpProvider(f.__name__, PROVIDER, f, supports_sizes, batch_invariant=True) for f in functions]

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        query_start_loc: torch.Tensor,
        read_slots: torch.Tensor,
        write_slots: torch.Tensor,
        max_query_len: int,
        activation: str,
    ) -> torch.Tensor:
        """Weighted sum of each channel's last kernel_size inputs within its sequence."""
        x = rows_of(x)
        weight = weight if weight.is_contiguous() else weight.contiguous()
        out = workspace.empty(x.shape, x.dtype)
        self._causal_conv1d(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            state.data_ptr(),
            out.data_ptr(),
            *_step_arguments((query_start_loc, read_slots, write_slots, max_query_len), len(x)),
            x.shape[1],
            weight.shape[1],
            activation == "silu",
            DTYPE_CODES[x.dtype],
        )
        return out

    def ssd(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        state: torch.Tensor,
        query_start_loc: torch.Tensor,
        read_slots: torch.Tensor,
        write_slots: torch.Tensor,
        max_query_len: int,
        dt_min: float,
        dt_max: float,
    ) -> torch.Tensor:
        """Advances the state-space model of each sequence and head (Mamba-2)."""
        x, b, c = _heads_of(x), _heads_of(b), _heads_of(c)
        dt = rows_of(dt)
        out = workspace.empty(x.shape, x.dtype)
        self._ssd(
            x.data_ptr(),
            x.stride(0),
            dt.data_ptr(),
            dt.stride(0),
            a.data_ptr(),
            b.data_ptr(),
            b.stride(0),
            c.data_ptr(),
            c.stride(0),
            None if d is None else d.data_ptr(),
            None if dt_bias is None else dt_bias.data_ptr(),
            state.data_ptr(),
            out.data_ptr(),
            *_step_arguments((query_start_loc, read_slots, write_slots, max_query_len), len(x)),
            x.shape[1],
            x.shape[2],
            b.shape[1],
            b.shape[2],
            dt_min,
            dt_max,
            DTYPE_CODES[x.dtype],
        )
        return out

    def gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        query_start_loc: torch.Tensor,
        read_slots: torch.Tensor,
        write_slots: torch.Tensor,
        max_query_len: int,
        scale: float,
        l2_norm: bool,
    ) -> torch.Tensor:
        """Advances linear attention with a delta rule and one decay per head (Gated DeltaNet)."""
        slots = query_start_loc, read_slots, write_slots, max_query_len
        return self._advance(q, k, v, rows_of(g), beta, state, slots, scale, l2_norm, channel_decay=False)

    def kda(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        query_start_loc: torch.Tensor,
        read_slots: torch.Tensor,
        write_slots: torch.Tensor,
        max_query_len: int,
        scale: float,
        l2_norm: bool,
    ) -> torch.Tensor:
        """Advances linear attention with a delta rule and one decay per key channel (Kimi Delta Attention)."""
        slots = query_start_loc, read_slots, write_slots, max_query_len
        return self._advance(q, k, v, _heads_of(g), beta, state, slots, scale, l2_norm, channel_decay=True)

    def _advance(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        slots: Slots,
        scale: float,
        l2_norm: bool,
        *,
        channel_decay: bool,
    ) -> torch.Tensor:
        q, k, v, beta = _heads_of(q), _heads_of(k), _heads_of(v), rows_of(beta)
        out = workspace.empty(v.shape, v.dtype)
        self._delta_rule(
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            g.data_ptr(),
            g.stride(0),
            beta.data_ptr(),
            beta.stride(0),
            state.data_ptr(),
            out.data_ptr(),
            *_step_arguments(slots, len(v)),
            k.shape[1],
            v.shape[1],
            k.shape[2],
            v.shape[2],
            scale,
            l2_norm,
            channel_decay,
            DTYPE_CODES[beta.dtype],
            DTYPE_CODES[v.dtype],
        )
        return out

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        activation: str,
    ) -> torch.Tensor:
        """Each group of a row divided by its root mean square, times weight, with a gate."""
        heads = x.shape[1] if x.dim() == 3 else 1
        out = workspace.empty(x.shape, x.dtype)
        x, gate = _rows_of_heads(x), None if gate is None else _rows_of_heads(gate)
        self._gated_rms_norm(
            *_place_of_rows(x),
            *_place_of_rows(gate),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0] * heads,
            heads,
            x.shape[-1],
            group_size,
            eps,
            norm_before_gate,
            activation == "sigmoid",
            DTYPE_CODES[weight.dtype],
            DTYPE_CODES[x.dtype],
        )
        return out


def _step_arguments(slots: Slots, num_tokens: int) -> tuple[int | None, int, int, int, int]:
    """The kernels' arguments for a step; without query_start_loc token i belongs to request i."""
    query_start_loc, read_slots, write_slots, max_query_len = slots
    num_requests = read_slots.shape[0]
    is_one_token = max_query_len == 1 and num_requests == num_tokens
    pointer = None if is_one_token else query_start_loc.data_ptr()
    return pointer, read_slots.data_ptr(), write_slots.data_ptr(), num_requests, num_tokens


def _rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """`x` [T, size] or [T, heads, size]; not copied if the elements of each row are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _place_of_rows(x: torch.Tensor | None) -> tuple[int | None, int, int]:
    """Address, and the distances between tokens and between heads."""
    if x is None:
        return None, 0, 0
    return x.data_ptr(), x.stride(0), x.stride(1) if x.dim() == 3 else 0


def _heads_of(x: torch.Tensor) -> torch.Tensor:
    """`x` [T, heads, size]; not copied if the elements of each token are contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
