"""Kernels of layers with a state: a short convolution, the recurrence of Mamba-2, and delta rules.

A program of a recurrence holds a part of one head's state of one request, and advances it by the request's tokens, one
after the other. The convolution computes many tokens at a time. The tokens of a request and its slots are read on the
device. Slot -1: the state begins with zeros, or is not stored.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def token_range(query_start_loc, request, ONE_TOKEN: tl.constexpr):
    """First and last token of a request; with ONE_TOKEN token i belongs to request i."""
    if ONE_TOKEN:
        start = request
        stop = request + 1
    else:
        start = tl.load(query_start_loc + request)
        stop = tl.load(query_start_loc + request + 1)
    return start, stop


@triton.jit
def softplus(x):
    """log(1 + e^x). The quotient corrects the rounding of 1 + e^x for small e^x."""
    u = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + u
    small = w == 1.0
    return tl.where(x > 20.0, x, tl.where(small, u, tl.log(w) * (u / tl.where(small, 1.0, w - 1.0))))


@triton.jit
def causal_conv1d(
    out,  # [T, CHANNELS], contiguous
    x,  # [T, CHANNELS]
    weight,  # [CHANNELS, KERNEL]
    bias,  # [CHANNELS]
    state,  # [slots, CHANNELS, KERNEL - 1]
    query_start_loc,
    read_slots,
    write_slots,
    x_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    TAIL_PAD: tl.constexpr,  # KERNEL - 1, rounded up to a power of two
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    BLOCK_T: tl.constexpr,  # at least KERNEL - 1, unless ONE_TOKEN
    BLOCK_C: tl.constexpr,
):
    request = tl.program_id(0)
    tile = tl.program_id(1)
    start, stop = token_range(query_start_loc, request, ONE_TOKEN)
    length = stop - start
    if tile * BLOCK_T < length:
        TAIL: tl.constexpr = KERNEL - 1
        c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
        is_channel = c < CHANNELS
        read = tl.load(read_slots + request).to(tl.int64)
        tails = state + read * CHANNELS * TAIL
        t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        is_token = t < length
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for k in tl.static_range(KERNEL):
            at = t - TAIL + k
            of_step = (is_token & (at >= 0))[:, None] & is_channel[None, :]
            rows = (start + at).to(tl.int64)
            value = tl.load(x + rows[:, None] * x_stride + c[None, :], mask=of_step, other=0.0).to(tl.float32)
            if k < TAIL:
                of_state = (is_token & (at < 0) & (read >= 0))[:, None] & is_channel[None, :]
                older = tl.load(tails + c[None, :] * TAIL + (at + TAIL)[:, None], mask=of_state, other=0.0)
                value += older.to(tl.float32)
            factor = tl.load(weight + c * KERNEL + k, mask=is_channel, other=0.0).to(tl.float32)
            total += value * factor[None, :]
        if HAS_BIAS:
            total += tl.load(bias + c, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        place = (start + t).to(tl.int64)[:, None] * CHANNELS + c[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=is_token[:, None] & is_channel[None, :])
        write = tl.load(write_slots + request).to(tl.int64)
        if (tile == 0) & (write >= 0):  # the only program that reads the channels' tails
            j = tl.arange(0, TAIL_PAD)
            source = length - TAIL + j
            is_input = is_channel[:, None] & (j < TAIL)[None, :]
            inputs = x + (start + source).to(tl.int64)[None, :] * x_stride + c[:, None]
            newer = tl.load(inputs, mask=is_input & (source >= 0)[None, :], other=0.0)
            kept = is_input & ((source < 0) & (read >= 0))[None, :]
            kept_inputs = tl.load(tails + c[:, None] * TAIL + (source + TAIL)[None, :], mask=kept, other=0.0)
            tl.debug_barrier()  # all threads have read the slot, which may be the same
            places = state + write * CHANNELS * TAIL + c[:, None] * TAIL + j[None, :]
            tl.store(places, tl.where((source >= 0)[None, :], newer, kept_inputs), mask=is_input)


@triton.jit
def selective_state_update(
    out,  # [T, HEADS, SIZE], contiguous
    x,  # [T, HEADS, SIZE]
    dt,  # [T, HEADS]
    a,  # [HEADS]
    b,  # [T, GROUPS, STATES]
    c,  # likewise
    d,  # [HEADS]
    dt_bias,  # [HEADS]
    state,  # [slots, HEADS, SIZE, STATES]
    query_start_loc,
    read_slots,
    write_slots,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    dt_min,
    dt_max,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    STATES: tl.constexpr,
    PAD: tl.constexpr,  # STATES, rounded up to a power of two
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,  # rows of the head's state
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    start, stop = token_range(query_start_loc, request, ONE_TOKEN)
    if start < stop:
        p = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        n = tl.arange(0, PAD)
        is_row = p < SIZE
        is_state = n < STATES
        mask = is_row[:, None] & is_state[None, :]
        place = (head * SIZE + p[:, None]) * STATES + n[None, :]
        read = tl.load(read_slots + request).to(tl.int64)
        h = tl.load(state + read * (HEADS * SIZE * STATES) + place, mask=mask & (read >= 0), other=0.0)
        rate = tl.load(a + head)
        group = head * GROUPS // HEADS
        for t in range(start, stop):
            row = tl.cast(t, tl.int64)
            step = tl.load(dt + row * dt_stride + head).to(tl.float32)
            if HAS_BIAS:
                step += tl.load(dt_bias + head)
            step = tl.minimum(tl.maximum(softplus(step), dt_min), dt_max)
            value = tl.load(x + row * x_stride + head * SIZE + p, mask=is_row, other=0.0).to(tl.float32)
            added = tl.load(b + row * b_stride + group * STATES + n, mask=is_state, other=0.0).to(tl.float32)
            wanted = tl.load(c + row * c_stride + group * STATES + n, mask=is_state, other=0.0).to(tl.float32)
            h = h * tl.exp(step * rate) + (value * step)[:, None] * added[None, :]
            y = tl.sum(h * wanted[None, :], 1)
            if HAS_D:
                y += value * tl.load(d + head)
            tl.store(out + (row * HEADS + head) * SIZE + p, y.to(out.dtype.element_ty), mask=is_row)
        write = tl.load(write_slots + request).to(tl.int64)
        tl.debug_barrier()  # all threads have read the slot, which may be the same
        tl.store(state + write * (HEADS * SIZE * STATES) + place, h, mask=mask & (write >= 0))


def _kernel_name(specialization: Any) -> str:
    """The name of the compiled kernel, which profilers print."""
    return "kda" if specialization.constants["CHANNEL_DECAY"] else "gated_delta_rule"


@triton.jit(repr=_kernel_name)
def gated_delta_rule(
    out,  # [T, V_HEADS, V], contiguous
    q,  # [T, K_HEADS, K]
    k,  # likewise
    v,  # [T, V_HEADS, V]
    g,  # [T, V_HEADS], or [T, V_HEADS, K] with CHANNEL_DECAY
    beta,  # [T, V_HEADS]
    state,  # [slots, V_HEADS, K, V]
    query_start_loc,
    read_slots,
    write_slots,
    q_stride,
    k_stride,
    v_stride,
    g_stride,
    beta_stride,
    scale,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PAD: tl.constexpr,  # K, rounded up to a power of two
    CHANNEL_DECAY: tl.constexpr,
    L2_NORM: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of the head's state
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    start, stop = token_range(query_start_loc, request, ONE_TOKEN)
    if start < stop:
        i = tl.arange(0, PAD)
        j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        is_key = i < K
        is_value = j < V
        mask = is_key[:, None] & is_value[None, :]
        place = (head * K + i[:, None]) * V + j[None, :]
        read = tl.load(read_slots + request).to(tl.int64)
        s = tl.load(state + read * (V_HEADS * K * V) + place, mask=mask & (read >= 0), other=0.0)
        key_head = head * K_HEADS // V_HEADS
        for t in range(start, stop):
            row = tl.cast(t, tl.int64)
            query = tl.load(q + row * q_stride + key_head * K + i, mask=is_key, other=0.0).to(tl.float32)
            key = tl.load(k + row * k_stride + key_head * K + i, mask=is_key, other=0.0).to(tl.float32)
            if L2_NORM:
                query = query * tl.rsqrt(tl.sum(query * query, 0) + 1e-6)
                key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
            if CHANNEL_DECAY:
                decay = tl.exp(tl.load(g + row * g_stride + head * K + i, mask=is_key, other=0.0))
                s = s * decay[:, None]
            else:
                s = s * tl.exp(tl.load(g + row * g_stride + head))
            share = tl.load(beta + row * beta_stride + head).to(tl.float32)
            value = tl.load(v + row * v_stride + head * V + j, mask=is_value, other=0.0).to(tl.float32)
            correction = (value - tl.sum(s * key[:, None], 0)) * share
            s = s + key[:, None] * correction[None, :]
            y = tl.sum(s * query[:, None], 0) * scale
            tl.store(out + (row * V_HEADS + head) * V + j, y.to(out.dtype.element_ty), mask=is_value)
        write = tl.load(write_slots + request).to(tl.int64)
        tl.debug_barrier()  # all threads have read the slot, which may be the same
        tl.store(state + write * (V_HEADS * K * V) + place, s, mask=mask & (write >= 0))


@triton.jit
def gated_rms_norm(
    out,  # [T, HEADS, GROUPS, SIZE], contiguous
    x,
    gate,
    weight,  # [GROUPS, SIZE]
    eps,
    x_stride,
    x_head_stride,
    gate_stride,
    gate_head_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    HAS_GATE: tl.constexpr,
    NORM_BEFORE_GATE: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    mask = i < SIZE
    column = tl.program_id(1) * SIZE + i
    token = row // HEADS
    head = row % HEADS
    y = tl.load(x + token * x_stride + head * x_head_stride + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.zeros([PAD], tl.float32) + 1.0
    if HAS_GATE:
        place = token * gate_stride + head * gate_head_stride + column
        gates = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
        factor = 1.0 / (1.0 + tl.exp(-gates))
        if not SIGMOID:
            factor = gates * factor
        if not NORM_BEFORE_GATE:
            y = y * factor
    y = y * tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps)
    y = y * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_GATE and NORM_BEFORE_GATE:
        y = y * factor
    tl.store(out + row * (GROUPS * SIZE) + column, y.to(out.dtype.element_ty), mask=mask)
