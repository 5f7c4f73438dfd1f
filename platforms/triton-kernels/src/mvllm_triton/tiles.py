"""Tile sizes as pure functions of shapes: no autotuning at run time, and equal shapes launch equal grids.

A tile of keys or of values takes 16 KiB, a tile of latents, which are both, 32 KiB: two stages of these fit the 64 KiB
of shared memory of the smallest target.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_BYTES = 16 << 10
MAX_SPLITS = 64
MOST_DRAFTED = 8
"""Maximum query tokens of a decode: one token, and the draft tokens to verify."""

LONGEST = 1 << 20
"""Query tokens of a prompt that fills its tiles in any case."""

PARTIAL_BYTES = 64 << 20
"""Memory limit for the partial sums of splits."""


@dataclass(frozen=True)
class AttentionTiles:
    """How attention is divided among programs.

    Attributes:
        rows: Rows of a tile: tokens times the query heads that share a key/value head.
        columns: Keys per iteration.
        heads: Query heads in a tile.
        tokens: Query tokens in a tile.
        num_warps, num_stages: Of a program.
    """

    rows: int
    columns: int
    heads: int
    tokens: int
    num_warps: int
    num_stages: int


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << (n - 1).bit_length())


def attention_tiles(
    head_size: int,
    block_size: int,
    itemsize: int,
    group: int,
    max_query_len: int,
    *,
    latent: bool = False,
    narrow: bool = False,
) -> AttentionTiles:
    """Tiles of attention.

    Args:
        head_size: Elements of a key or a value, whichever is more; with latents, those of the latent alone.
        block_size: Tokens per block of the cache.
        itemsize: Bytes of an element of the compute dtype.
        group: Query heads that share a key/value head.
        max_query_len: Maximum query tokens of a request.
        latent: Whether values are parts of their keys.
        narrow: Whether the cache has 8-bit elements; widening them takes registers.
    """
    row_bytes = power_of_two(head_size, 16) * itemsize
    columns = max(32 if latent else 16, min(128, TILE_BYTES // row_bytes))
    while columns > max(block_size, 64):  # more keys per iteration need more block_table lookups
        columns //= 2
    most_rows = max(16, min(128, (2 if itemsize == 2 else 1) * TILE_BYTES // row_bytes))
    rows = min(most_rows, power_of_two(group * max_query_len, 16))
    if narrow and rows >= 64:
        columns = min(columns, 32)
    heads = min(group, rows)
    held = rows * power_of_two(head_size, 16) * max(itemsize, 2) // 2  # elements that a program keeps in registers
    num_warps = 8 if rows >= 128 or held >= 1 << 14 else 4
    num_stages = 2 if itemsize > 2 or rows >= 64 or latent else 3
    return AttentionTiles(rows, columns, heads, rows // heads, num_warps, num_stages)


def num_splits(num_programs: int, num_keys: int, columns: int, processors: int, partial_bytes: int) -> int:
    """Number of programs among which the keys of each tile are split, so that all processors have work.

    Args:
        num_programs: Programs without splits that have work.
        num_keys: Maximum keys of a tile.
        columns: Keys per iteration.
        processors: Multiprocessors of the device.
        partial_bytes: Memory that each split takes.
    """
    wanted = 2 * processors // max(num_programs, 1)
    useful = num_keys // (2 * columns)  # a split has at least two tiles of keys
    return max(1, min(wanted, useful, MAX_SPLITS, PARTIAL_BYTES // max(partial_bytes, 1)))


def combining_warps(elements: int) -> int:
    """Warps of a program that reduces `elements` of all splits, a power of two: at most 64 elements per thread."""
    return max(1, min(16, elements // 2048))


def write_heads(num_heads: int, size: int) -> int:
    """Heads of a token that one program stores; a head takes `size` elements, a power of two."""
    return min(power_of_two(num_heads), max(1, 4096 // size))


@dataclass(frozen=True)
class RowTiles:
    """How rows are divided among programs: `rows` per program of `num_warps` warps."""

    rows: int
    num_warps: int


def row_tiles(size: int) -> RowTiles:
    """For kernels that hold whole rows of `size` elements, a power of two: at least 1024 elements, 16 per thread."""
    rows = max(1, 1024 // size)
    return RowTiles(rows, max(1, min(16, rows * size // 512)))


def rotated_heads(num_heads: int, pairs: int) -> int:
    """Heads of a token that one program rotates; a head has `pairs` pairs, a power of two."""
    return min(power_of_two(num_heads), max(1, 1024 // pairs))


def argmax_piece(num_rows: int, size: int) -> tuple[int, int]:
    """Elements of a row per program, and per iteration. With few rows, each row is divided among more programs."""
    block = min(1024, power_of_two(size))
    pieces = max(1, min(-(-size // block), 1024 // num_rows))
    return -(-size // (pieces * block)) * block, block


@dataclass(frozen=True)
class ProductTiles:
    """Tile sizes of a product of matrices [m, k] and [k, n]: `rows` of m, `columns` of n, `inner` of k."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


def expert_tiles(num_entries: int, num_experts: int, itemsize: int) -> ProductTiles:
    """Tiles for the products of experts; each expert gets `num_entries / num_experts` rows on average."""
    rows = min(128 if itemsize == 2 else 64, power_of_two(-(-num_entries // num_experts), 16))
    inner = 64 if itemsize == 2 else 32
    columns = 64 if rows <= 64 and itemsize == 2 else 32 if itemsize > 2 else 128
    return ProductTiles(rows, columns, inner, 8 if rows >= 128 else 4, 2 if rows >= 128 or itemsize > 2 else 3)


def packed_expert_tiles(
    num_entries: int, num_experts: int, itemsize: int, *, gated: bool, narrow: bool = False
) -> ProductTiles:
    """Tiles for experts whose weights are widened in registers; the weight sets `inner`.

    Args:
        num_entries, num_experts: As for `expert_tiles`, whose `rows` these have.
        itemsize: Bytes of an element of the compute dtype.
        gated: Whether there are accumulators of both gate and up.
        narrow: Whether a row has 32 bytes per load. More columns then give each thread of 256 16 bytes to load.
    """
    rows = expert_tiles(num_entries, num_experts, itemsize).rows
    wide = (rows <= 16 and narrow) or (rows >= 128 and not gated)
    columns = 32 if itemsize > 2 else 128 if wide else 64
    return ProductTiles(rows, columns, 0, 8 if rows >= 128 else 4, _stages(rows, itemsize))


def quantized_tiles(num_rows: int, out_features: int, itemsize: int) -> ProductTiles:
    """Tiles for products with integers; the weight sets `inner`."""
    rows = min(128 if itemsize == 2 else 64, power_of_two(num_rows, 16))
    columns = 32 if itemsize > 2 else _columns(rows, out_features)
    return ProductTiles(rows, columns, 0, 8 if rows >= 128 else 4, _stages(rows, itemsize))


def float8_tiles(num_rows: int, out_features: int, in_features: int, group_size: int) -> ProductTiles:
    """Tiles for products of float8 with float8; `inner` divides a group if there are several."""
    rows = min(128, power_of_two(num_rows, 16))
    inner = min(128, group_size) if group_size < in_features else 128
    return ProductTiles(rows, _columns(rows, out_features), inner, 8 if rows >= 128 else 4, 3 if rows < 128 else 2)


def _columns(rows: int, out_features: int) -> int:
    """Each tile of columns reads all rows again, so few and small matrices alone get narrow tiles."""
    if rows <= 16:
        return 32 if out_features < 2048 else 64
    return 64 if rows <= 64 or out_features < 4096 else 128


def _stages(rows: int, itemsize: int) -> int:
    """Pipeline stages of products that read few bytes per tile."""
    return 2 if rows >= 128 or itemsize > 2 else 4 if rows <= 16 else 3


@dataclass(frozen=True)
class InnerSplits:
    """How the inner dimension of a product is divided: `num` programs with `size` columns each, the last with fewer."""

    num: int
    size: int


def inner_splits(
    num_programs: int, in_features: int, inner: int, processors: int, *, most: int = MAX_SPLITS
) -> InnerSplits:
    """Number of programs among which the inner dimension is split, so that every multiprocessor has two programs.

    Args:
        num_programs: Programs without splits.
        in_features: Columns of the weight.
        inner: Columns per iteration.
        processors: Multiprocessors of the device.
        most: Limit for the memory of partial results.
    """
    iterations = -(-in_features // inner)
    wanted = -(-2 * processors // max(1, num_programs))
    num = max(1, min(wanted, iterations // 2, most, MAX_SPLITS))
    size = -(-iterations // num)
    return InnerSplits(-(-iterations // size), size * inner)


def most_splits(rows: int, out_features: int, weight_bytes: int) -> int:
    """Splits whose float32 partial results have at most half as many bytes as the weight that is read; 1 for many rows.

    Args:
        rows: Rows of a tile.
        out_features: Columns of the result.
        weight_bytes: Bytes of the weight.
    """
    return 1 if rows > 64 else max(1, weight_bytes // (8 * rows * out_features))


def sampled_block(size: int) -> int:
    """Tokens per block: a power of two near the square root of the vocabulary size, like the number of blocks."""
    return 1 << (size.bit_length() + 1) // 2
