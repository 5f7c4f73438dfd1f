"""Paged attention for prefill, chunked prefill, decode and mixed steps in one function; plain and latent (MLA).

Launches depend on shapes and on numbers from the host (`max_query_len`, `max_seq_len`), never on the content of
tensors. So a launch can be captured in a graph and replayed with other lengths up to those maxima.
"""

from __future__ import annotations

import torch

from mvllm_triton.device import has_tensor_memory, processors, reads_float8, shared_memory, warp_size
from mvllm_triton.float8 import read_as
from mvllm_triton.kernels import attention as kernels
from mvllm_triton.tiles import (
    LONGEST,
    MOST_DRAFTED,
    AttentionTiles,
    AttentionWork,
    attention_tiles,
    combining_tile,
    long_work,
    power_of_two,
    short_work,
)

Scale = torch.Tensor | float | None
"""Factor on stored keys or values: a number, a float32 tensor of one element, or a float32 tensor
[num_blocks, block_size, kv_heads] with a scale for each token and head. None means 1."""


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    out: torch.Tensor | None = None,
    float8: torch.dtype = torch.float8_e4m3fn,
    splits: int | None = None,
    visible_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a step's queries over a paged cache.

    Args:
        q: [T, heads, head_size], the compute dtype: bfloat16, float16 or float32. The last dimension is contiguous.
        k_cache: [num_blocks, block_size, kv_heads, head_size]; a float dtype, a float8 dtype, int8, or uint8 for float8
            codes on a device without float8 conversions. The last dimension is contiguous.
        v_cache: [num_blocks, block_size, kv_heads, value_size], likewise.
        block_table: int32 [R, P]. Entries after a request's last block and before its window are ignored.
        query_start_loc: int32 [R + 1]. Tokens from query_start_loc[R] on are padding; their results are zeros.
        seq_lens: int32 [R], this step's tokens included.
        scale: Factor on query-key products; positive.
        max_query_len: Upper bound of the query tokens of a request.
        max_seq_len: Estimate of the longest sequence. It affects only how work is divided: a bad estimate costs speed.
        window: A query at position p sees keys at positions > p - window.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap).
        sinks: [heads]: one additional softmax logit per head, without a value.
        k_scale, v_scale: Factors on stored keys and values: both None, both numbers, or both tensors of the same kind.
        out: [T, heads, value_size]: output tensor; the last dimension is contiguous. None allocates one.
        float8: Format of codes in uint8.
        splits: Number of programs, for each tile of heads, among which the keys of a launch are divided; None chooses
            as many as keep the device busy.
        visible_lens: int32 [T]: how many leading positions of its sequence each token sees, at least those up to its
            own; keys after these are in the cache. None for those up to its own.

    Returns:
        [T, heads, value_size], compute dtype.

    Raises:
        ValueError: Shapes or dtypes don't fit together.
    """
    value_size = v_cache.shape[3]
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.shape[3] != q.shape[2]:
        raise ValueError(
            f"Queries {list(q.shape)}, keys {list(k_cache.shape)} and values {list(v_cache.shape)} do not fit together."
        )
    return _launch(
        q, k_cache, v_cache, 0, value_size, block_table, query_start_loc, seq_lens, scale, max_query_len, max_seq_len,
        window, soft_cap, sinks, k_scale, v_scale, out, float8, splits, visible_lens,
    )  # fmt: skip


def mla_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    value_size: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scale: Scale = None,
    out: torch.Tensor | None = None,
    float8: torch.dtype = torch.float8_e4m3fn,
    splits: int | None = None,
    visible_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over latents: the first `value_size` elements of a key are its value.

    Args:
        q: [T, heads, head_size]: queries in the latent space, then their rotary parts.
        cache: [num_blocks, block_size, kv_heads, head_size]: latents, then the rotary parts; kv_heads is usually 1.
        value_size: Elements of the latent, less than head_size.
        kv_scale: Like `k_scale` of `paged_attention`.

    The other arguments are those of `paged_attention`.

    Returns:
        [T, heads, value_size], compute dtype.

    Raises:
        ValueError: Shapes or dtypes don't fit together.
    """
    if cache.shape[3] != q.shape[2] or not 0 < value_size < q.shape[2]:
        raise ValueError(
            f"Queries {list(q.shape)}, a cache {list(cache.shape)} and values of {value_size} elements in its keys do "
            f"not fit together."
        )
    return _launch(
        q, cache, cache, q.shape[2] - value_size, value_size, block_table, query_start_loc, seq_lens, scale,
        max_query_len, max_seq_len, window, soft_cap, sinks, kv_scale, kv_scale, out, float8, splits, visible_lens,
    )  # fmt: skip


def _launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rest_size: int,
    value_size: int,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    k_scale: Scale,
    v_scale: Scale,
    out: torch.Tensor | None,
    float8: torch.dtype,
    splits: int | None,
    visible_lens: torch.Tensor | None,
) -> torch.Tensor:
    """Launches both kinds of attention. `rest_size`: elements of a latent key that are not part of its value, or 0.

    A batch of decodes takes the short launch, the prompt of one request the long launch, and a mixed batch both
    (kernels/attention.py).
    """
    num_tokens, num_heads, head_size = q.shape
    block_size, num_kv_heads = keys.shape[1:3]
    _check(q, keys, values, block_table, out, scale)
    latent = rest_size > 0
    main_size = value_size if latent else head_size
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty((num_tokens, num_heads, value_size), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    if keys.dtype == torch.uint8 and reads_float8(q.device, float8):
        keys, values = keys.view(float8), values.view(float8)
    kind, k_factor, v_factor = scale_kind(k_scale, v_scale)
    k_scales = k_scale if isinstance(k_scale, torch.Tensor) else q  # an unused pointer
    v_scales = v_scale if isinstance(v_scale, torch.Tensor) else q
    k_scale_strides = k_scales.stride() if kind == 2 else (0, 0, 0)
    v_scale_strides = v_scales.stride() if kind == 2 else (0, 0, 0)
    given_sinks = q if sinks is None else sinks
    num_requests = seq_lens.shape[0]

    def tiles_for(query_len: int) -> AttentionTiles:
        return attention_tiles(
            max(main_size, value_size), block_size, q.element_size(), group, query_len, latent=latent,
            narrow=keys.element_size() == 1, shared_memory=shared_memory(q.device),
            warp_size=warp_size(q.device), tensor_memory=has_tensor_memory(q.device),
        )  # fmt: skip

    def launch(tiles: AttentionTiles, work: AttentionWork, *, short: bool, skipped: int, padding: bool) -> None:
        part = part_max = part_sum = out
        head_tiles = num_kv_heads * -(-group // tiles.heads)
        divided = work.num_partials > 0
        if divided:
            shape = (work.num_partials, head_tiles, tiles.rows)
            part = torch.empty((*shape, value_size), dtype=torch.float32, device=q.device)
            part_max = torch.empty(shape, dtype=torch.float32, device=q.device)
            part_sum = torch.empty(shape, dtype=torch.float32, device=q.device)
        kernels.paged_attention[(work.grid, head_tiles)](
            out, part, part_max, part_sum, q, keys, values, k_scales, v_scales, given_sinks, block_table,
            query_start_loc, seq_lens, query_start_loc if visible_lens is None else visible_lens, num_requests,
            num_tokens, work.programs, work.least, scale * k_factor, v_factor,
            q.stride(0), q.stride(1), *keys.stride()[:3], *values.stride()[:3], *k_scale_strides, *v_scale_strides,
            block_table.stride(0), out.stride(0), out.stride(1),
            SHORT=short,
            PADDING=padding,
            SKIPPED=skipped,
            GROUP=group,
            HEADS=tiles.heads,
            HEAD_SIZE=main_size,
            HEAD_PAD=power_of_two(main_size, 16),
            REST_SIZE=rest_size,
            REST_PAD=power_of_two(max(rest_size, 1), 16),
            VALUE_SIZE=value_size,
            VALUE_PAD=power_of_two(value_size, 16),
            BLOCK_SIZE=block_size,
            BLOCK_Q=tiles.tokens,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.columns,
            SPLIT=divided,
            WINDOW=window or 0,
            SOFT_CAP=soft_cap or 0.0,
            SINKS=sinks is not None,
            LATENT=latent,
            SCALES=kind,
            FP8=read_as(keys.dtype, float8),
            SPANS=visible_lens is not None,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )  # fmt: skip
        if divided:
            most_rows = min(tiles.tokens, max(max_query_len, 1)) * tiles.heads
            rows, pieces = combining_tile(power_of_two(value_size, 16), most_rows)
            kernels.paged_attention_reduce[(work.divided_tiles, head_tiles, -(-most_rows // rows))](
                out, part, part_max, part_sum, given_sinks, query_start_loc, seq_lens, num_requests, work.programs,
                work.least, out.stride(0), out.stride(1),
                SHORT=short,
                SKIPPED=skipped,
                GROUP=group,
                HEADS=tiles.heads,
                VALUE_SIZE=value_size,
                VALUE_PAD=power_of_two(value_size, 16),
                BLOCK_Q=tiles.tokens,
                BLOCK_M=tiles.rows,
                BLOCK_N=tiles.columns,
                ROWS=rows,
                PIECES=pieces,
                WINDOW=window or 0,
                SINKS=sinks is not None,
                num_warps=4,
            )  # fmt: skip

    def seen(tiles: AttentionTiles) -> int:
        return max_seq_len if window is None else min(max_seq_len, window + tiles.tokens)

    def launch_short(tiles: AttentionTiles, *, padding: bool) -> None:
        bytes_per_partial = tiles.rows * value_size * 4
        head_tiles = num_kv_heads * -(-group // tiles.heads)
        work = short_work(
            num_requests, head_tiles, -(-seen(tiles) // tiles.columns), processors(q.device), bytes_per_partial, splits
        )
        launch(tiles, work, short=True, skipped=0, padding=padding)

    # Few tile sizes: each one is compiled in the first step that needs it, which then takes seconds.
    short = tiles_for(MOST_DRAFTED if 1 < max_query_len <= MOST_DRAFTED else 1)
    if max_query_len <= short.tokens:
        launch_short(short, padding=True)
        return out
    long = tiles_for(LONGEST)
    skipped = 0 if num_requests == 1 else short.tokens
    head_tiles = num_kv_heads * -(-group // long.heads)
    work = long_work(
        num_tokens, num_requests, long.tokens, head_tiles, -(-seen(long) // long.columns), processors(q.device),
        long.rows * value_size * 4, splits,
    )  # fmt: skip
    launch(long, work, short=False, skipped=skipped, padding=True)
    if num_requests > 1:
        launch_short(short, padding=False)
    return out


def scale_kind(k_scale: Scale, v_scale: Scale) -> tuple[int, float, float]:
    """The kind of scales: 0 for numbers, 1 for tensors of one element, 2 for one scale per token and head.

    Returns:
        The kind, and the numbers; 1.0 for tensors.

    Raises:
        ValueError: Keys and values have scales of different kinds.
    """
    kinds = [
        0 if not isinstance(scale, torch.Tensor) else 1 if scale.numel() == 1 and scale.dim() != 3 else 2
        for scale in (k_scale, v_scale)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError("Scales of keys and of values must be of one kind: both numbers, or both tensors alike.")
    k_factor, v_factor = (
        1.0 if scale is None or isinstance(scale, torch.Tensor) else float(scale) for scale in (k_scale, v_scale)
    )
    return kinds[0], k_factor, v_factor


def _check(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor | None,
    scale: float,
) -> None:
    if not scale > 0:
        raise ValueError(f"The scale of attention must be positive, not {scale}.")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"Queries are bfloat16, float16 or float32, not {q.dtype}.")
    if q.shape[1] % keys.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads do not divide among {keys.shape[2]} key/value heads.")
    if keys.dtype != values.dtype:
        raise ValueError(f"Keys are stored as {keys.dtype} and values as {values.dtype}; both must be of one dtype.")
    for name, x in (("q", q), ("keys", keys), ("values", values), ("block_table", block_table), ("out", out)):
        if x is not None and x.numel() and x.stride(-1) != 1:
            raise ValueError(f"The last dimension of {name} must be contiguous; its strides are {x.stride()}.")
