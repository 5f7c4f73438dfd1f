"""Operations on sequence states with static shapes, in torch operations that do not depend on values.

They have the parameters of core's operations, and neither read a tensor on the host nor launch work that depends on the
lengths of requests. So a step can be compiled by a compiler with static shapes, or captured in a graph.

Tokens are gathered into *tiles* of one request each. The shapes depend on T and R only:

    tokens   a a a a a b b c c c c . .          3 requests, 13 tokens with padding, tiles of 4
    tiles    [a a a a] [a - - -] [b b - -] [c c c c] [- - - -] [- - - -]

A tile changes the state S of a head by a linear function, A S + B. A and B of all tiles are computed at once. Then a
scan with ceil(log2(tiles of the longest possible request)) products gives the state before each tile, and again all
tiles at once give their results. A is 0 for the first tile of a request, whose B contains the state of its read slot.

The sums within a tile are those of the references (`ssd`, `delta_rule`). Computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from mvllm.ops.delta_rule import Products, normalized, products_with_channel_decays, products_with_decays
from mvllm.ops.ssd import decay_between
from mvllm.platform.op_provider import OpCase, OpProvider

PROVIDER = "static_shapes"
DTYPES = ("float32", "bfloat16", "float16")
SMALLEST_TILE = 16
LARGEST_TILE = 64
TILE_WITH_CHANNEL_DECAYS = 16
"""There is one decay for each pair of tokens and channel."""

BeforeWrite = Callable[[torch.Tensor], None]
"""Called with a state tensor before a step writes to it."""

Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
"""query_start_loc, read_slots, write_slots and max_query_len."""


def _nothing(state: torch.Tensor) -> None:
    pass


def static_state_ops(before_write: Callable[[torch.Tensor], None] | None = None) -> tuple[OpProvider, ...]:
    """Providers of `causal_conv1d`, `ssd`, `gated_delta_rule` and `kda` with static shapes, for `Platform.ops`.

    Args:
        before_write: Called with each state tensor before a step writes to it, inside of a compiled function too.
    """
    functions: tuple[Callable[..., torch.Tensor], ...] = (causal_conv1d, ssd, gated_delta_rule, kda)
    return tuple(
        OpProvider(
            function.__name__,
            PROVIDER,
            function if before_write is None else partial(function, before_write=before_write),
            _supports,
        )
        for function in functions
    )


def _supports(case: OpCase) -> list[str]:
    return [] if case.dtype in DTYPES else [f"dtype {case.dtype} is not among {', '.join(DTYPES)}"]


class _Tiles:
    """The tokens of a step in tiles of a static number and size.

    Args:
        query_start_loc: int32 [R + 1].
        num_tokens: T.
        largest: Most tokens of a tile, a power of two.

    Attributes:
        num_levels: Products of a scan that spans the tiles of a request of T tokens.
        lengths: int64 [R]: tokens of each request.
        request: int64 [tiles]: the request of each tile; any for unused ones.
        is_first: bool [tiles]: whether it is the first tile of its request.
        last: int64 [R]: the last tile of each request; any for requests without tokens.
    """

    def __init__(self, query_start_loc: torch.Tensor, num_tokens: int, largest: int) -> None:
        num_requests, device = len(query_start_loc) - 1, query_start_loc.device
        per_request = max(1, num_tokens // num_requests)
        size = min(largest, max(SMALLEST_TILE, 1 << (per_request.bit_length() - 1)))
        count = min(num_tokens, num_tokens // size + num_requests)
        self.num_levels = (-(-num_tokens // size) - 1).bit_length()
        bounds = query_start_loc.long()
        starts, stops = bounds[:-1], bounds[1:]
        self.lengths = stops - starts
        ends = ((self.lengths + (size - 1)) // size).cumsum(0)
        firsts = ends - (self.lengths + (size - 1)) // size
        tile = torch.arange(count, device=device)
        self.request = _rank_of(tile, ends)
        self.last = (ends - 1).clamp(min=0)
        within = tile - firsts.index_select(0, self.request)
        is_used = tile < ends[-1]
        self.is_first = (within == 0) & is_used
        first_token = starts.index_select(0, self.request) + within * size
        room = stops.index_select(0, self.request) - first_token
        along = torch.arange(size, device=device)
        self._is_token = (along < room[:, None]) & is_used[:, None]
        self._tokens = (first_token[:, None] + along).clamp(0, num_tokens - 1).flatten()
        token = torch.arange(num_tokens, device=device)
        owner = _rank_of(token, stops)
        offset = token - starts.index_select(0, owner)
        place = firsts.index_select(0, owner) * size + offset  # tiles of a request are adjacent, all but the last full
        self._place = place.clamp(0, count * size - 1)
        self._shape = (count, size)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] to [tiles, size, ...], with zeros where a tile has no token."""
        tiled = x.index_select(0, self._tokens).unflatten(0, self._shape)
        return torch.where(self._is_token.view(*self._shape, *[1] * (x.dim() - 1)), tiled, 0.0)

    def scatter(self, y: torch.Tensor) -> torch.Tensor:
        """[tiles, size, ...] to [T, ...]; tokens of padding get any of the rows."""
        return y.flatten(0, 1).index_select(0, self._place)


def _rank_of(values: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """int64 [n]: index of the first end, of `ends` [R] in rising order, above each value; R - 1 if there is none."""
    return (ends <= values[:, None]).sum(dim=1).clamp(max=len(ends) - 1)


class _Cells(Protocol):
    """What a recurrence computes of all tiles at once. States are [tiles, heads, rows, columns], float32."""

    def transition(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of the function A S + B by which each tile changes its state."""

    def apply(self, a: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """A S; of two A's their composition."""

    def advance(self, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Results [tiles, size, heads, ...] of tiles that begin with states S, and the states after them."""


def _advance(
    cells_of: Callable[..., _Cells],
    inputs: tuple[torch.Tensor, ...],
    state: torch.Tensor,
    step: Step,
    largest: int,
    before_write: BeforeWrite,
) -> torch.Tensor:
    """Runs a recurrence over the requests of a step and updates their states in place.

    Args:
        cells_of: Makes the cells from the inputs in tiles, [tiles, size, ...] each.
        inputs: [T, ...]. Zeros must leave a state as it is.
        state: [num_slots + 1, heads, rows, columns].
        largest: Most tokens of a tile.

    Returns:
        [T, heads, ...].
    """
    query_start_loc, read_slots, write_slots, max_query_len = step
    start = _read(state, read_slots)
    if len(inputs[0]) == len(read_slots) and max_query_len == 1:
        y, end = cells_of(*(x.unsqueeze(1) for x in inputs)).advance(start)
        _write(state, write_slots, end, before_write)
        return y.flatten(0, 1)
    tiles = _Tiles(query_start_loc, len(inputs[0]), largest)
    cells = cells_of(*(tiles.gather(x) for x in inputs))
    before = start.index_select(0, tiles.request)
    if tiles.num_levels:
        is_first = tiles.is_first.view(-1, 1, 1, 1)
        a, b = cells.transition()
        b = torch.where(is_first, cells.apply(a, before) + b, b)
        after = _scan(cells, torch.where(is_first, 0.0, a), b, tiles.num_levels)
        before = torch.where(is_first, before, torch.cat((before[:1], after[:-1])))
        y, _ = cells.advance(before)
    else:
        y, after = cells.advance(before)
    end = after.index_select(0, tiles.last)
    _write(state, torch.where(tiles.lengths > 0, write_slots, -1), end, before_write)
    return tiles.scatter(y)


def _scan(cells: _Cells, a: torch.Tensor, b: torch.Tensor, num_levels: int) -> torch.Tensor:
    """The states after each tile: S[i] = A[i] S[i - 1] + B[i], where S before the first tile is 0."""
    for level in range(num_levels):
        distance = 1 << level
        if distance >= len(b):
            break
        later = a[distance:]
        b = torch.cat((b[:distance], cells.apply(later, b[:-distance]) + b[distance:]))
        if level + 1 < num_levels:
            a = torch.cat((a[:distance], cells.apply(later, a[:-distance])))
    return b


def _read(state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The states of `slots`, [R, ...]; zeros for slot -1."""
    states = state.index_select(0, slots.clamp(min=0).long())
    return torch.where((slots >= 0).view(-1, *[1] * (state.dim() - 1)), states, 0.0)


def _write(state: torch.Tensor, slots: torch.Tensor, new: torch.Tensor, before_write: BeforeWrite) -> None:
    """Stores the states of `slots`; those of slot -1 go to the scratch memory."""
    before_write(state)
    state.index_copy_(0, torch.where(slots < 0, len(state) - 1, slots).long(), new.to(state.dtype))


class _SsdCells:
    """Cells of `ssd`: A is a number per head."""

    def __init__(self, a: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        per_group = x.shape[2] // b.shape[2]
        self._dt = dt.transpose(1, 2)  # [tiles, H, L]
        self._x = x.transpose(1, 2)
        self._b, self._c = (part.transpose(1, 2).repeat_interleave(per_group, dim=1) for part in (b, c))
        log_decay = self._dt * a[:, None]
        self._since_start = log_decay.cumsum(dim=-1).exp()
        self._between = decay_between(log_decay)  # [tiles, H, L, L]
        remaining = self._x * (self._dt * self._between[:, :, -1])[..., None]
        self._added = remaining.transpose(2, 3) @ self._b

    def transition(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._since_start[..., -1, None, None], self._added

    def apply(self, a: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return a * s

    def advance(self, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (self._c @ self._b.transpose(2, 3)) * self._between * self._dt[:, :, None, :]
        y = weights @ self._x + (self._c @ s.transpose(2, 3)) * self._since_start[..., None]
        return y.transpose(1, 2), s * self._since_start[..., -1, None, None] + self._added


class _DeltaCells:
    """Cells of the delta rules: A is a matrix per head."""

    def __init__(
        self,
        products_of: Products,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> None:
        per_head = v.shape[2] // k.shape[2]
        q, k = (part.repeat_interleave(per_head, dim=2) for part in (q, k))
        self._heads = v.shape[0], v.shape[2]
        q, k, v, g, beta = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v, g, beta))  # [tiles * H, L, ...]
        since_start = g.cumsum(dim=1).exp()
        of_keys, self._of_queries, until_end = products_of(q, k, g)
        share = beta[..., None]
        self._inverse = unit_lower_inverse(of_keys.tril(-1) * share)
        self._values, self._keys = v * share, k * since_start * share
        self._queries, self._kept_keys = q * since_start, (k * until_end).transpose(1, 2)
        self._decay = since_start[:, -1, :, None]

    def transition(self) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self._kept_keys @ self._inverse
        decay = torch.diag_embed(self._decay.squeeze(-1).expand(-1, self._keys.shape[-1]))
        a, b = decay - kept @ self._keys, kept @ self._values
        return a.unflatten(0, self._heads), b.unflatten(0, self._heads)

    def apply(self, a: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return a @ s

    def advance(self, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = s.flatten(0, 1)
        corrections = self._inverse @ (self._values - self._keys @ s)
        y = self._queries @ s + self._of_queries @ corrections
        end = s * self._decay + self._kept_keys @ corrections
        return y.unflatten(0, self._heads).transpose(1, 2), end.unflatten(0, self._heads)


def unit_lower_inverse(below: torch.Tensor) -> torch.Tensor:
    """The inverse of 1 + `below`, by inverses of diagonal blocks of 1, 2, 4, ... rows.

    As stable as substitution, unlike sums of powers of `below`, which cancel.

    Args:
        below: [..., L, L], zeros on and above the diagonal; L is a power of two.

    Returns:
        [..., L, L].
    """
    size = below.shape[-1]
    row = torch.arange(size, device=below.device)
    inverse = (row[:, None] == row).to(below.dtype).expand(below.shape)
    block = 1
    while block < size:
        index = row // block
        is_left_of_diagonal = (index[:, None] == index + 1) & (index[:, None] % 2 == 1)
        inverse = inverse - inverse @ torch.where(is_left_of_diagonal, below, 0.0) @ inverse
        block *= 2
    return inverse


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
    *,
    before_write: BeforeWrite = _nothing,
) -> torch.Tensor:
    """See core's operation. An input before the step's tokens is an element of the state."""
    wide = torch.promote_types(x.dtype, torch.float32)
    num_tokens, size = len(x), weight.shape[1] - 1
    starts = query_start_loc.long()
    request = _rank_of(torch.arange(num_tokens, device=x.device), starts[1:])
    offset = torch.arange(num_tokens, device=x.device) - starts.index_select(0, request)
    tails = _read(state, read_slots).transpose(1, 2).flatten(0, 1)  # [R * size, channels]
    inputs, filters = F.pad(x, (0, 0, size, 0)), weight.to(wide)
    y = x.to(wide) * filters[:, size]
    for k in range(size):
        tail = tails.index_select(0, request * size + (offset + k).clamp(0, size - 1))
        is_older = (offset + k < size)[:, None]
        y = y + torch.where(is_older, tail, inputs[k : k + num_tokens]).to(wide) * filters[:, k]
    if bias is not None:
        y = y + bias.to(wide)
    if size:
        lengths = starts[1:] - starts[:-1]
        place = torch.arange(size, device=x.device) + lengths[:, None]  # in the tail and the request's tokens behind it
        newer = x.index_select(0, (starts[:-1, None] + place - size).clamp(0, num_tokens - 1).flatten())
        first = torch.arange(len(lengths), device=x.device)[:, None] * size
        older = tails.index_select(0, (first + place.clamp(max=size - 1)).flatten())
        new = torch.where((place >= size).flatten()[:, None], newer, older).unflatten(0, (-1, size)).transpose(1, 2)
        _write(state, torch.where(lengths > 0, write_slots, -1), new, before_write)
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)


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
    *,
    before_write: BeforeWrite = _nothing,
) -> torch.Tensor:
    """See core's operation."""
    wide = state.dtype
    steps = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias
    steps = F.softplus(steps).clamp(dt_min, dt_max)
    values = x.to(wide)
    step = query_start_loc, read_slots, write_slots, max_query_len
    inputs = values, steps, b.to(wide), c.to(wide)
    y = _advance(partial(_SsdCells, a), inputs, state, step, LARGEST_TILE, before_write)
    return (y if d is None else y + values * d[:, None]).to(x.dtype)


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
    *,
    before_write: BeforeWrite = _nothing,
) -> torch.Tensor:
    """See core's operation."""
    step = query_start_loc, read_slots, write_slots, max_query_len
    inputs = q, k, v, g[..., None], beta
    return _delta_rule(products_with_decays, inputs, state, step, LARGEST_TILE, scale, l2_norm, before_write)


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
    *,
    before_write: BeforeWrite = _nothing,
) -> torch.Tensor:
    """See core's operation."""
    step = query_start_loc, read_slots, write_slots, max_query_len
    inputs, largest = (q, k, v, g, beta), TILE_WITH_CHANNEL_DECAYS
    return _delta_rule(products_with_channel_decays, inputs, state, step, largest, scale, l2_norm, before_write)


def _delta_rule(
    products_of: Products,
    inputs: tuple[torch.Tensor, ...],
    state: torch.Tensor,
    step: Step,
    largest: int,
    scale: float,
    l2_norm: bool,
    before_write: BeforeWrite,
) -> torch.Tensor:
    """Both operations; the inputs are q, k, v, g and beta, with g [T, num_v_heads, 1 or k_head_dim]."""
    q, k, v, g, beta = (x.to(state.dtype) for x in inputs)
    if l2_norm:
        q, k = normalized(q), normalized(k)
    cells_of = partial(_DeltaCells, products_of)
    return _advance(cells_of, (q * scale, k, v, g, beta), state, step, largest, before_write).to(inputs[2].dtype)
