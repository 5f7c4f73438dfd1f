"""The operations of the delta rule: linear attention whose state is corrected towards each value.

The state S maps keys to values. Each token decays it, reads what it holds for the token's key, and adds a share beta of
the difference to the token's value. The decay is one number per head (`gated_delta_rule`, Gated DeltaNet,
https://arxiv.org/abs/2412.06464) or one per channel of the key (`kda`, Kimi Delta Attention,
https://arxiv.org/abs/2510.26692).

Longer sequences are computed in chunks. The corrections u of a chunk's tokens depend on each other through the products
of their keys only, so they solve a triangular system:

    u[i] + beta[i] · sum over j < i of decay(j, i) (k[i] · k[j]) · u[j] = beta[i] · (v[i] - decayed S · k[i])
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema
from mvllm.ops.ssd import decay_between
from mvllm.ops.state_slots import advance_states

CHUNK = 64
CHUNK_WITH_CHANNEL_DECAYS = 16
"""Fewer tokens, since there is one decay for each pair of tokens and channel."""

L2_NORM_EPS = 1e-6

Products = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


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
    """Advances linear attention with a delta rule and one decay per head (Gated DeltaNet).

        S = exp(g[t]) · S[t - 1]
        S[t] = S + k[t] ⊗ (beta[t] · (v[t] - k[t] · S))
        y[t] = scale · q[t] · S[t]

    Args:
        q, k: [T, num_k_heads, k_head_dim], compute dtype; the last dimension is contiguous. Value head h uses head
            h · num_k_heads // num_v_heads.
        v: [T, num_v_heads, v_head_dim], compute dtype; the last dimension is contiguous.
        g: [T, num_v_heads], float32: logarithm of the decay, <= 0.
        beta: [T, num_v_heads], compute dtype or float32: share of the difference that is added.
        state: [num_slots + 1, num_v_heads, k_head_dim, v_head_dim], float32; updated in place.
        query_start_loc: [R + 1], int32: tokens query_start_loc[i] to query_start_loc[i + 1] belong to request i. Tokens
            past the last are padding; their results are unspecified, but finite for finite inputs.
        read_slots: [R], int32: the slot of each request's state before the step, or -1 for zeros.
        write_slots: [R], int32: the slot of its state after the step, or -1 for none. A request without tokens writes
            nothing. A slot that one request writes is not read by another one.
        max_query_len: The most tokens of a request. If it is 1 and R = T, token i belongs to request i, and the
            function does not wait for the device.
        scale: Factor of the result.
        l2_norm: Whether q and k are divided by their length first: by sqrt(sum of squares + 1e-6).

    Returns:
        [T, num_v_heads, v_head_dim], compute dtype; computed in float32.
    """
    step = query_start_loc, read_slots, write_slots, max_query_len
    return _delta_rule(products_with_decays, CHUNK, q, k, v, g[..., None], beta, state, step, scale, l2_norm)


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
    """Advances linear attention with a delta rule and one decay per key channel (Kimi Delta Attention).

        S = exp(g[t])[:, None] · S[t - 1]
        S[t] = S + k[t] ⊗ (beta[t] · (v[t] - k[t] · S))
        y[t] = scale · q[t] · S[t]

    Args:
        q, k: [T, num_heads, k_head_dim], compute dtype; the last dimension is contiguous.
        v: [T, num_heads, v_head_dim], compute dtype; the last dimension is contiguous.
        g: [T, num_heads, k_head_dim], float32: logarithm of the decay, <= 0; the last dimension is contiguous.
        beta: [T, num_heads], compute dtype or float32: share of the difference that is added.
        state: [num_slots + 1, num_heads, k_head_dim, v_head_dim], float32; updated in place.
        query_start_loc: [R + 1], int32: tokens query_start_loc[i] to query_start_loc[i + 1] belong to request i. Tokens
            past the last are padding; their results are unspecified, but finite for finite inputs.
        read_slots: [R], int32: the slot of each request's state before the step, or -1 for zeros.
        write_slots: [R], int32: the slot of its state after the step, or -1 for none. A request without tokens writes
            nothing. A slot that one request writes is not read by another one.
        max_query_len: The most tokens of a request. If it is 1 and R = T, token i belongs to request i, and the
            function does not wait for the device.
        scale: Factor of the result.
        l2_norm: Whether q and k are divided by their length first: by sqrt(sum of squares + 1e-6).

    Returns:
        [T, num_heads, v_head_dim], compute dtype; computed in float32.
    """
    step = query_start_loc, read_slots, write_slots, max_query_len
    chunk = CHUNK_WITH_CHANNEL_DECAYS
    return _delta_rule(products_with_channel_decays, chunk, q, k, v, g, beta, state, step, scale, l2_norm)


def _delta_rule(
    products: Products,
    chunk: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int],
    scale: float,
    l2_norm: bool,
) -> torch.Tensor:
    """Both operations; g is [T, num_v_heads, 1] or [T, num_v_heads, k_head_dim]."""
    wide = state.dtype
    per_head = v.shape[1] // k.shape[1]
    query, key = q.to(wide), k.to(wide)
    if l2_norm:
        query, key = normalized(query), normalized(key)

    def one_token(
        s: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (part.repeat_interleave(per_head, dim=1) for part in (q, k))
        s = s * g.exp()[..., None]
        correction = (v - (k[..., None, :] @ s).squeeze(-2)) * beta[..., None]
        s = s + k[..., None] * correction[..., None, :]
        return (q[..., None, :] @ s).squeeze(-2), s

    def sequence(s: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, g, beta = (part.transpose(0, 1) for part in inputs)  # heads first
        q, k = (part.repeat_interleave(per_head, dim=0) for part in (q, k))
        results = []
        for start in range(0, v.shape[1], chunk):
            tokens = slice(start, start + chunk)
            y, s = _chunk(products, s, *(part[:, tokens] for part in (q, k, v, g, beta)))
            results.append(y)
        return torch.cat(results, dim=1).transpose(0, 1), s

    inputs = query * scale, key, v.to(wide), g.to(wide), beta.to(wide)
    return advance_states(one_token, sequence, inputs, v.new_zeros(v.shape), state, *step)


def normalized(x: torch.Tensor) -> torch.Tensor:
    """The vectors of the last dimension divided by their length."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_NORM_EPS)


def _chunk(
    products: Products,
    s: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A few tokens of one sequence: s [H, K, V], q and k [H, L, K], v [H, L, V], g [H, L, 1 or K] to y [H, L, V]."""
    since_start = g.cumsum(dim=1).exp()
    of_keys, of_queries, until_end = products(q, k, g)
    system = of_keys.tril(-1) * beta[..., None]
    differences = (v - (k * since_start) @ s) * beta[..., None]
    corrections = torch.linalg.solve_triangular(system, differences, upper=False, unitriangular=True)
    y = (q * since_start) @ s + of_queries @ corrections
    return y, s * since_start[:, -1, :, None] + (k * until_end).transpose(1, 2) @ corrections


def products_with_decays(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decayed products of keys and of queries with earlier keys, and each token's decay until the last one.

    Args:
        q, k: [H, L, K].
        g: [H, L, 1].

    Returns:
        [H, L, L], [H, L, L] and [H, L, 1].
    """
    decays, transposed = decay_between(g.squeeze(-1)), k.transpose(1, 2)
    return (k @ transposed) * decays, (q @ transposed) * decays, decays[:, -1, :, None]


def products_with_channel_decays(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `products_with_decays`, for g [H, L, K]; the decays until the last token are [H, L, K]."""
    decays = decay_between(g.transpose(1, 2))  # [H, K, L, L]
    earlier = k.transpose(1, 2)[..., None, :] * decays
    of_keys, of_queries = ((x.transpose(1, 2)[..., None] * earlier).sum(dim=1) for x in (k, q))
    return of_keys, of_queries, decays[:, :, -1].transpose(1, 2)


_HEAD_DIMS = {"k_head_dim": "elements of a key", "v_head_dim": "elements of a value"}

GATED_DELTA_RULE = OpSchema(
    gated_delta_rule,
    facts={
        "num_k_heads": "heads of queries and keys on this rank",
        "num_v_heads": "heads of values on this rank",
        **_HEAD_DIMS,
    },
    updates=("state",),
)
KDA = OpSchema(kda, facts={"num_heads": "heads on this rank", **_HEAD_DIMS}, updates=("state",))


def log_decay(x: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """factors · softplus(x + bias), the `g` of `gated_delta_rule` and `kda`.

    Args:
        x: [T, width], compute dtype; rows may be strided, their elements are contiguous.
        factors: [num_heads], float32: of each head, <= 0. Each head has width / num_heads consecutive elements.
        bias: [width], float32.

    Returns:
        [T, width], float32; computed in float32.
    """
    soft = F.softplus(x.to(torch.promote_types(x.dtype, torch.float32)) + bias)
    return (soft.unflatten(-1, (len(factors), -1)) * factors.unsqueeze(-1)).flatten(-2)


LOG_DECAY = OpSchema(log_decay, facts={"num_heads": "heads on this rank", "width": "elements of a row on this rank"})
