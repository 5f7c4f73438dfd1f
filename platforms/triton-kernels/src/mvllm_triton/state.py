"""Layers with a state: a short convolution, the recurrence of Mamba-2, delta rules, and the gated norm after them.

The functions have the parameters of core's operations. Each is one launch for any step. Its grid depends on shapes and
`max_query_len` only, and the requests' tokens and slots are read on the device, so a launch can be captured.
"""

from __future__ import annotations

import torch

from mvllm_triton.kernels import state as kernels
from mvllm_triton.tiles import power_of_two

Slots = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
"""query_start_loc, read_slots, write_slots and max_query_len."""

STATE_ELEMENTS = 4096
"""Numbers of a state that a program holds."""

CONV_TOKENS, CONV_CHANNELS = 32, 64


def causal_conv1d(
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
    """Weighted sum of each channel's last kernel_size inputs within its sequence; updates `state` in place.

    Args:
        x: [T, channels]; the last dimension is contiguous.
        weight: [channels, kernel_size], contiguous, of at most 33 inputs.
        bias: [channels] or None.
        state: [slots, channels, kernel_size - 1], contiguous.
        query_start_loc: [R + 1], int32: the tokens of each request.
        read_slots, write_slots: [R], int32: slots of its state before and after the step; -1 for zeros and for none.
        max_query_len: The most tokens of a request.
        activation: `silu` or `none`.

    Returns:
        [T, channels], zeros for tokens of no request.
    """
    slots = query_start_loc, read_slots, write_slots, max_query_len
    one_token = _is_one_token(slots, len(x))
    channels, kernel_size = weight.shape
    out = _result(x.shape, x, one_token)
    tokens = 1 if one_token else CONV_TOKENS
    tail = max(1, kernel_size - 1)
    kernels.causal_conv1d[(len(read_slots), -(-max_query_len // tokens), -(-channels // CONV_CHANNELS))](
        out, x, weight, _or(bias, weight), state, *slots[:3], x.stride(0),
        CHANNELS=channels,
        KERNEL=kernel_size,
        TAIL_PAD=power_of_two(tail),
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        ONE_TOKEN=one_token,
        BLOCK_T=tokens,
        BLOCK_C=CONV_CHANNELS,
        num_warps=1 if one_token else 4,
    )  # fmt: skip
    return out


def ssd(
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
    """Advances the state-space model of each sequence and head (Mamba-2); updates `state` in place.

    Args:
        x: [T, num_heads, head_dim].
        dt: [T, num_heads].
        a: [num_heads], float32.
        b, c: [T, num_groups, state_size].
        d, dt_bias: [num_heads] or None, float32.
        state: [slots, num_heads, head_dim, state_size], float32, contiguous.
        query_start_loc, read_slots, write_slots, max_query_len: As of `causal_conv1d`.
        dt_min, dt_max: Bounds of the step size.

    Returns:
        [T, num_heads, head_dim], zeros for tokens of no request.
    """
    x, b, c = _heads_of(x), _heads_of(b), _heads_of(c)
    slots = query_start_loc, read_slots, write_slots, max_query_len
    one_token = _is_one_token(slots, len(x))
    num_heads, head_dim, state_size = state.shape[1:]
    out = _result(x.shape, x, one_token)
    pad = power_of_two(state_size)
    block = min(power_of_two(head_dim), max(1, STATE_ELEMENTS // pad))
    kernels.selective_state_update[(len(read_slots), num_heads, -(-head_dim // block))](
        out, x, dt, a, b, c, _or(d, a), _or(dt_bias, a), state, *slots[:3],
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), dt_min, dt_max,
        HEADS=num_heads,
        SIZE=head_dim,
        GROUPS=b.shape[1],
        STATES=state_size,
        PAD=pad,
        HAS_D=d is not None,
        HAS_BIAS=dt_bias is not None,
        ONE_TOKEN=one_token,
        BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def gated_delta_rule(
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
    """Advances linear attention with a delta rule and one decay per head; updates `state` in place.

    Args:
        q, k: [T, num_k_heads, k_head_dim].
        v: [T, num_v_heads, v_head_dim].
        g: [T, num_v_heads], float32.
        beta: [T, num_v_heads].
        state: [slots, num_v_heads, k_head_dim, v_head_dim], float32, contiguous.
        query_start_loc, read_slots, write_slots, max_query_len: As of `causal_conv1d`.
        scale: Factor of the result.
        l2_norm: Whether q and k are divided by their length first.

    Returns:
        [T, num_v_heads, v_head_dim], zeros for tokens of no request.
    """
    return _delta_rule(
        q, k, v, g, beta, state, (query_start_loc, read_slots, write_slots, max_query_len), scale, l2_norm
    )


def kda(
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
    """Advances linear attention with a delta rule and one decay per key channel; updates `state` in place.

    Args:
        q, k: [T, num_heads, k_head_dim].
        v: [T, num_heads, v_head_dim].
        g: [T, num_heads, k_head_dim], float32.
        beta: [T, num_heads].
        state: [slots, num_heads, k_head_dim, v_head_dim], float32, contiguous.
        query_start_loc, read_slots, write_slots, max_query_len: As of `causal_conv1d`.
        scale: Factor of the result.
        l2_norm: Whether q and k are divided by their length first.

    Returns:
        [T, num_heads, v_head_dim], zeros for tokens of no request.
    """
    slots = query_start_loc, read_slots, write_slots, max_query_len
    return _delta_rule(q, k, v, _heads_of(g), beta, state, slots, scale, l2_norm)


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots: Slots,
    scale: float,
    l2_norm: bool,
) -> torch.Tensor:
    q, k, v = _heads_of(q), _heads_of(k), _heads_of(v)
    one_token = _is_one_token(slots, len(v))
    num_heads, k_dim, v_dim = state.shape[1:]
    out = _result(v.shape, v, one_token)
    pad = power_of_two(k_dim)
    block = min(power_of_two(v_dim), max(1, STATE_ELEMENTS // pad))
    kernels.gated_delta_rule[(len(slots[1]), num_heads, -(-v_dim // block))](
        out, q, k, v, g, beta, state, *slots[:3],
        q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0), scale,
        K_HEADS=k.shape[1],
        V_HEADS=num_heads,
        K=k_dim,
        V=v_dim,
        PAD=pad,
        CHANNEL_DECAY=g.dim() == 3,
        L2_NORM=l2_norm,
        ONE_TOKEN=one_token,
        BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    activation: str,
) -> torch.Tensor:
    """Each group of a row divided by its root mean square, times weight, with a gate; computed in float32.

    Args:
        x: [T, width] or [T, heads, width]; the last dimension is contiguous.
        gate: Like x, or None.
        weight: [width].
        eps: Added to the mean square.
        group_size: Consecutive elements that are normalised together.
        norm_before_gate: Whether the gate is multiplied after the norm.
        activation: `silu` or `sigmoid`, of the gate.

    Returns:
        Shape and dtype of `x`, contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    width, pad = x.shape[-1], power_of_two(group_size)
    heads = x.shape[1] if x.dim() == 3 else 1
    gate_strides = (0, 0) if gate is None else (gate.stride(0), gate.stride(-2))
    kernels.gated_rms_norm[(len(x) * heads, width // group_size)](
        out, x, _or(gate, x), weight, eps, x.stride(0), x.stride(-2), *gate_strides,
        HEADS=heads,
        GROUPS=width // group_size,
        SIZE=group_size,
        PAD=pad,
        HAS_GATE=gate is not None,
        NORM_BEFORE_GATE=norm_before_gate,
        SIGMOID=activation == "sigmoid",
        num_warps=max(1, min(8, pad // 256)),
    )  # fmt: skip
    return out


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """An argument of a launch that the kernel does not read if it is absent."""
    return other if tensor is None else tensor


def _is_one_token(slots: Slots, num_tokens: int) -> bool:
    """Whether token i belongs to request i."""
    return slots[3] == 1 and len(slots[1]) == num_tokens


def _result(shape: torch.Size, like: torch.Tensor, one_token: bool) -> torch.Tensor:
    """Zeros if tokens may belong to no request."""
    return (torch.empty if one_token else torch.zeros)(shape, dtype=like.dtype, device=like.device)


def _heads_of(x: torch.Tensor) -> torch.Tensor:
    """`x` [T, heads, size]; copied if the elements of a token are not contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
