"""The operation `ssd`: the state-space recurrence of Mamba-2.

One token multiplies the state of each head by a number and adds an outer product. Longer sequences are computed in
chunks (the state-space dual form of https://arxiv.org/abs/2405.21060): within a chunk as attention with a decay, and
between chunks through the state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema
from mvllm.ops.state_slots import advance_states

CHUNK = 64


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
    """Advances the state-space model of each sequence and head (Mamba-2).

        dt = clamp(softplus(dt + dt_bias), dt_min, dt_max)
        h[t] = exp(dt · a) · h[t - 1] + dt · x[t] ⊗ b[t]
        y[t] = h[t] · c[t] + d · x[t]

    Args:
        x: [T, num_heads, head_dim], compute dtype; the last dimension is contiguous.
        dt: [T, num_heads], compute dtype: step sizes before bias and softplus; the last dimension is contiguous.
        a: [num_heads], float32, negative.
        b, c: [T, num_groups, state_size], compute dtype; the last dimension is contiguous. Head h belongs to group
            h · num_groups // num_heads.
        d: [num_heads] or None, float32: weight of the input in the result.
        dt_bias: [num_heads] or None, float32.
        state: [num_slots + 1, num_heads, head_dim, state_size], float32; updated in place.
        query_start_loc: [R + 1], int32: tokens query_start_loc[i] to query_start_loc[i + 1] belong to request i. Tokens
            past the last are padding; their results are unspecified, but finite for finite inputs.
        read_slots: [R], int32: the slot of each request's state before the step, or -1 for zeros.
        write_slots: [R], int32: the slot of its state after the step, or -1 for none. A request without tokens writes
            nothing. A slot that one request writes is not read by another one.
        max_query_len: The most tokens of a request. If it is 1 and R = T, token i belongs to request i, and the
            function does not wait for the device.
        dt_min, dt_max: Bounds of dt; dt_max may be infinite.

    Returns:
        [T, num_heads, head_dim], compute dtype; computed in float32.
    """
    wide = state.dtype
    per_group = x.shape[1] // b.shape[1]
    steps = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias
    steps = F.softplus(steps).clamp(dt_min, dt_max)

    def one_token(
        h: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        b, c = (part.repeat_interleave(per_group, dim=1) for part in (b, c))
        h = h * (dt * a).exp()[..., None, None] + (x * dt[..., None])[..., None] * b[..., None, :]
        return (h @ c[..., None]).squeeze(-1), h

    def sequence(
        h: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, b, c = (part.transpose(0, 1) for part in (x, b, c))  # heads or groups first
        results = []
        for part in range(0, x.shape[1], CHUNK):
            chunk = slice(part, part + CHUNK)
            y, h = _chunk(h, x[:, chunk], dt[chunk].t(), a, b[:, chunk], c[:, chunk])
            results.append(y)
        return torch.cat(results, dim=1).transpose(0, 1), h

    step = query_start_loc, read_slots, write_slots, max_query_len
    values = x.to(wide)
    inputs = values, steps, b.to(wide), c.to(wide)
    result = torch.zeros(x.shape, dtype=wide, device=x.device)
    y = advance_states(one_token, sequence, inputs, result, state, *step)
    return (y if d is None else y + values * d[:, None]).to(x.dtype)


def _chunk(
    h: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A few tokens of one sequence: h [H, P, N], x [H, L, P], dt [H, L], b and c [G, L, N] to y [H, L, P] and h."""
    per_group = len(x) // len(b)
    log_decay = dt * a[:, None]
    since_start = log_decay.cumsum(dim=-1).exp()
    between = decay_between(log_decay)  # [H, L, L]
    weights = (c @ b.transpose(1, 2)).repeat_interleave(per_group, dim=0) * between * dt[:, None, :]
    b, c = (part.repeat_interleave(per_group, dim=0) for part in (b, c))
    y = weights @ x + (c @ h.transpose(1, 2)) * since_start[..., None]
    remaining = x * (dt * between[:, -1])[..., None]
    return y, h * since_start[:, -1, None, None] + remaining.transpose(1, 2) @ b


def decay_between(log_decay: torch.Tensor) -> torch.Tensor:
    """exp of the sum of log_decay[j + 1] to log_decay[i], at [..., i, j]; 1 for i = j and 0 for i < j.

    Sums of differences, not differences of sums: after a large negative number the latter have lost the small ones.

    Args:
        log_decay: [..., L], float32.

    Returns:
        [..., L, L], float32.
    """
    size = log_decay.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    sums = log_decay[..., None].expand(*log_decay.shape, size).masked_fill(~lower, 0.0).cumsum(dim=-2)
    return sums.exp().tril()


SSD = OpSchema(
    ssd,
    facts={
        "num_heads": "heads on this rank",
        "head_dim": "channels of a head",
        "num_groups": "groups of heads with common b and c on this rank",
        "state_size": "numbers of the state per channel",
    },
    updates=("state",),
)
