"""Tile sizes as pure functions of shapes: no autotuning at run time, and equal shapes launch equal grids.

A tile of keys or of values takes 16 KiB, a tile of latents, which are both, 32 KiB: two stages of these fit the 64 KiB
of shared memory of the smallest target.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_BYTES = 16 << 10
LEAST_SHARED_MEMORY = 64 << 10
LARGE_SHARED_MEMORY = 128 << 10
"""Shared memory of a program from which on tiles of keys and values are larger, and more of them are in flight."""

OPERANDS_IN_SHARED_MEMORY = 200 << 10
"""Shared memory of a program from which on devices read the queries and keys of a product from it; those with less
hold them in registers."""

PROGRAMS_PER_PROCESSOR = 4
LEAST_SHORT = 2
"""Tiles of keys that a program of a short launch takes at least."""

LEAST_LONG = 8
"""Tiles of keys from which on a tile of queries may have several programs."""

MOST_DRAFTED = 8
"""Maximum query tokens of a decode: one token, and the draft tokens to verify."""

LONGEST = 1 << 20
"""Query tokens of a prompt that fills its tiles in any case."""

MAX_INNER_SPLITS = 64
"""Maximum programs among which the inner dimension of a product is split."""

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
        num_warps, num_stages: Warps and pipeline stages of a program.
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
    shared_memory: int = LEAST_SHARED_MEMORY,
    warp_size: int = 32,
    tensor_memory: bool = False,
) -> AttentionTiles:
    """Tiles of attention.

    Args:
        head_size: Elements of a key or a value, whichever is more; with latents, those of the latent alone.
        block_size: Tokens per block of the cache.
        itemsize: Bytes of an element of the compute dtype.
        group: Query heads that share a key/value head.
        max_query_len: Maximum query tokens of a request.
        latent: Whether values are parts of their keys.
        narrow: Whether the cache has 8-bit elements. Widening them takes registers: latents of 64 rows, and heads of
            256 elements with 128 rows where registers hold the operands, then move more bytes to and from local memory
            than from the cache, in each iteration.
        shared_memory: Bytes of shared memory of a program at most.
        warp_size: Threads of a warp.
        tensor_memory: Whether the device sums products of 64 rows in a memory of its own. Sums of latents are scaled
            after each tile of keys; from there they pass through registers, which spills 1.1 KiB per thread, and
            shared memory of 245 KiB. Tiles of fewer rows do neither.
    """
    size = power_of_two(head_size, 16)
    row_bytes = size * itemsize
    large = shared_memory >= LARGE_SHARED_MEMORY and itemsize == 2
    most_rows = max(16, min(128, (2 if itemsize == 2 else 1) * (2 if large else 1) * TILE_BYTES // row_bytes))
    if latent and (tensor_memory or narrow):
        most_rows = min(most_rows, 32)
    elif narrow and size > 128 and shared_memory < OPERANDS_IN_SHARED_MEMORY:
        most_rows = min(most_rows, 64)
    rows = min(most_rows, power_of_two(group * max_query_len, 16))
    short = rows < 64 and not latent
    # Two tiles of keys and two of values fit, with those of queries, and in a short launch several times.
    tile_bytes = TILE_BYTES
    if large and (latent or (rows >= 64 and size > 256)):
        tile_bytes *= 2
    elif short and not large and itemsize == 2:
        tile_bytes //= 2
    columns = max(32 if latent else 16, min(128, tile_bytes // row_bytes))
    while columns > max(block_size, 64):  # more keys per iteration need more block_table lookups
        columns //= 2
    if narrow and rows >= 32:
        columns = min(columns, 32)
    heads = min(group, rows)
    held = rows * size * max(itemsize, 2) // 2  # elements that a program keeps in registers
    num_threads = 256 if rows >= 128 or held >= 1 << 14 or (latent and narrow and warp_size == 32) else 128
    # One tile of rows and few threads: many programs of a multiprocessor wait for memory at the same time. On an H200
    # two warps with two stages are faster than four warps with three from 64 sequences on, less clearly below.
    few = short and large and not narrow and warp_size == 32 and rows == 16 and size <= 128
    if few:
        num_threads = 64
    needed = 2 * (1 if latent else 2) * columns * row_bytes + (0 if short else rows * row_bytes)
    if few:
        num_stages = 2 if size > 64 else 3
    elif large:
        num_stages = 2 if size > 256 and rows >= 64 and not latent else 3
    else:
        num_stages = 3 if short and needed <= shared_memory // 2 else 2
    return AttentionTiles(
        rows, columns, heads, rows // heads, max(2 if few else 4, num_threads // warp_size), num_stages
    )


@dataclass(frozen=True)
class AttentionWork:
    """How the keys of one launch of attention are divided among programs; the programs compute the division.

    Attributes:
        grid: Programs of a launch, for each tile of heads.
        programs: Programs among which the tiles of keys are divided.
        least: Tiles of keys of a program at least, if it has part of the keys of a tile of queries.
        num_partials: Partial results that may exist; 0 if no tile of queries may have several programs.
        divided_tiles: Tiles of queries that may have several programs.
    """

    grid: int
    programs: int
    least: int
    num_partials: int
    divided_tiles: int


def short_work(
    num_requests: int,
    head_tiles: int,
    most_tiles: int,
    processors: int,
    bytes_per_partial: int,
    programs: int | None = None,
) -> AttentionWork:
    """Work of a short launch: as many programs as keep the processors busy take equal shares of all tiles of keys.

    Args:
        num_requests: Requests of the step.
        head_tiles: Tiles of heads; each has all the programs.
        most_tiles: Estimate of the tiles of keys of a request.
        processors: Multiprocessors of the device.
        bytes_per_partial: Bytes of a partial result.
        programs: Number of programs, for each tile of heads; None chooses.
    """
    least = 1 if programs else LEAST_SHORT
    if programs is None:
        wanted = -(-PROGRAMS_PER_PROCESSOR * processors // head_tiles)
        useful = -(-num_requests * most_tiles // least)
        programs = max(1, min(wanted, useful, PARTIAL_BYTES // (2 * head_tiles * bytes_per_partial)))
    divided = programs > 1
    return AttentionWork(programs, programs, least, 2 * programs if divided else 0, programs - 1)


def long_work(
    num_tokens: int,
    num_requests: int,
    tile_tokens: int,
    head_tiles: int,
    most_tiles: int,
    processors: int,
    bytes_per_partial: int,
    programs: int | None = None,
) -> AttentionWork:
    """Work of a long launch: a program for each tile of queries, several for those with many keys.

    Args:
        num_tokens: Tokens of the step.
        tile_tokens: Tokens of a tile of queries.

    The other arguments are those of `short_work`.
    """
    query_tiles = num_tokens // tile_tokens + num_requests  # the second term is for partly filled last tiles
    least = 1 if programs else LEAST_LONG
    if programs is None:
        programs = max(1, min(-(-processors // head_tiles), PARTIAL_BYTES // (2 * head_tiles * bytes_per_partial)))
        share = least
        if num_requests == 1:
            share = max(least, -(-(-(-num_tokens // tile_tokens) * most_tiles) // programs))
        if most_tiles <= share:
            programs = 1
    # A divided tile has at least two parts. Parts are more than half a share on average, so there are fewer than two
    # for each program. One program of the grid more than there are pieces stores zeros for padding.
    if programs == 1:
        return AttentionWork(query_tiles + 1, 1, least, 0, 0)
    return AttentionWork(query_tiles + programs + 1, programs, least, 2 * programs, programs)


def combining_tile(value_size: int, most_rows: int) -> tuple[int, int]:
    """Rows and partial results per iteration of a program that reduces these; `value_size` is a power of two.

    A program holds at most 64 elements per thread.
    """
    rows = min(8, power_of_two(most_rows), max(1, 1024 // value_size))
    return rows, max(2, 8192 // (rows * value_size))


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
class HistogramTiles:
    """How the tokens of a row are divided among the programs that count them.

    Attributes:
        piece: Tokens per program.
        block: Tokens per iteration.
        copies: Histograms of a row, each for some of its programs.
    """

    piece: int
    block: int
    copies: int


def histogram_tiles(num_rows: int, size: int) -> HistogramTiles:
    """Pieces of at least 1024 tokens, and about 1024 programs. With few rows, fewer programs share a histogram."""
    piece, block = argmax_piece(num_rows, size)
    return HistogramTiles(piece, block, max(1, min(8, 32 // num_rows, -(-size // piece))))


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


def routed_entries(num_experts: int) -> int:
    """Entries that one program sorts by expert: it compares each with every expert, `num_experts`, a power of two."""
    return max(16, min(256, 8192 // num_experts))


def lora_tiles(num_tokens: int, out_features: int, itemsize: int) -> ProductTiles:
    """Tiles for the products of adapters. Few tokens get small tiles, because adjacent tokens differ in adapter."""
    rows = 16 if num_tokens <= 256 else 32 if itemsize > 2 else 64
    columns = 32 if itemsize > 2 else 128 if out_features >= 4096 else 64
    inner = 64 if itemsize > 2 or rows > 16 else 128
    return ProductTiles(rows, columns, inner, 8 if rows >= 64 else 4, 2)


def lora_splits(num_programs: int, in_features: int, inner: int, processors: int) -> tuple[int, int]:
    """Number of parts of the input, and their size, so that all processors have work.

    Args:
        num_programs: Programs without splits.
        in_features: Columns of the input.
        inner: Columns per iteration.
        processors: Multiprocessors of the device.
    """
    iterations = -(-in_features // inner)
    wanted = max(1, min(iterations, 2 * processors // num_programs, 16))
    size = -(-iterations // wanted) * inner
    return -(-in_features // size), size


def packed_expert_tiles(
    num_entries: int,
    num_experts: int,
    itemsize: int,
    *,
    gated: bool,
    narrow: bool = False,
    unpacked_bits: int = 0,
) -> ProductTiles:
    """Tiles for experts whose weights are widened in registers; the weight sets `inner`.

    Args:
        num_entries, num_experts: As for `expert_tiles`, whose `rows` these have.
        itemsize: Bytes of an element of the compute dtype.
        gated: Whether there are accumulators of both gate and up.
        narrow: Whether a row has 32 bytes per load. More columns then give each thread of 256 16 bytes to load.
        unpacked_bits: Bits of the weights if their tiles are unpacked to registers and multiplied from there, else 0.
            See `quantized_tiles`. Tiles of 64 columns of gate and up with 8 bits would move 368 bytes per thread to
            and from local memory in each iteration.
    """
    rows = expert_tiles(num_entries, num_experts, itemsize).rows
    wide = (rows <= 16 and narrow) or (rows >= 128 and not gated and unpacked_bits != 4)
    small = itemsize > 2 or (rows >= 64 and gated and unpacked_bits == 8)
    columns = 32 if small else 128 if wide else 64
    return ProductTiles(rows, columns, 0, 8 if rows >= 128 else 4, _stages(rows, itemsize))


def quantized_tiles(
    num_rows: int, out_features: int, itemsize: int, *, unpacked_in_registers: bool = False
) -> ProductTiles:
    """Tiles for products with integers; the weight sets `inner`.

    Args:
        unpacked_in_registers: Whether the weight has 4 bits and its tile is multiplied from registers. A tile of 128
            rows and 128 columns has no registers left for it next to the sums of a group and of all groups: it would
            move 352 bytes per thread to local memory and back in each iteration, four times its loads.
    """
    rows = min(128 if itemsize == 2 else 64, power_of_two(num_rows, 16))
    columns = 32 if itemsize > 2 else _columns(rows, out_features)
    if unpacked_in_registers:
        columns = min(columns, 64)
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
    num_programs: int, in_features: int, inner: int, processors: int, *, most: int = MAX_INNER_SPLITS
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
    num = max(1, min(wanted, iterations // 2, most, MAX_INNER_SPLITS))
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


@dataclass(frozen=True)
class SkinnyGemmTiles:
    """How a product of few rows with a weight [n, k] is divided among programs.

    Attributes:
        rows: Rows of the tile that matrix instructions multiply; 1 for one row with multiply-adds.
        columns: Rows of the weight per program.
        inner: Columns of the weight per iteration.
        parts: Programs among which the columns of a tile are split.
        num_warps, num_stages: Warps and pipeline stages of a program.
    """

    rows: int
    columns: int
    inner: int
    parts: int
    num_warps: int
    num_stages: int


MAX_SKINNY_GEMM_ROWS = 64
"""Maximum rows of the products that `skinny_gemm_tiles` divides."""


def skinny_gemm_tiles(
    num_rows: int, out_features: int, in_features: int, processors: int, shared_memory: int
) -> SkinnyGemmTiles:
    """Tiles of products of at most MAX_SKINNY_GEMM_ROWS rows with 16-bit weights: all multiprocessors always read.

    The fastest of those that were measured on an H200 with the shapes of an 8B model. One row is multiplied by threads
    as they read; more rows by matrix instructions, whose tile of rows is read again for each tile of the weight, so
    these are larger. Where the weight has few rows, programs are few: each then keeps more on its way from memory.

    Args:
        num_rows, out_features, in_features: Sizes of the product.
        processors: Multiprocessors of the device.
        shared_memory: Bytes that a program can have.
    """
    rows = 1 if num_rows == 1 else power_of_two(num_rows, 16)
    (columns, inner, num_warps, num_stages), programs = _skinny_gemm_choice(num_rows, out_features, processors)
    inner = min(inner, power_of_two(in_features, 16))
    while inner > 32 and 2 * inner * (columns + rows) * min(num_stages, 3) > shared_memory:
        inner //= 2
    num_stages = min(num_stages, shared_memory // (2 * inner * (columns + rows)))
    num_tiles, iterations = -(-out_features // columns), -(-in_features // inner)
    wanted = programs * processors // num_tiles
    parts = max(1, min(wanted, iterations // 4, 8))
    return SkinnyGemmTiles(rows, columns, inner, parts, num_warps, num_stages)


def skinny_gemm_silu_and_mul_tiles(num_rows: int, in_features: int, shared_memory: int) -> SkinnyGemmTiles:
    """Tiles for gated products of few rows; `columns` of each half of the weight. See `skinny_gemm_tiles`."""
    rows = 1 if num_rows == 1 else power_of_two(num_rows, 16)
    columns, inner, num_warps, num_stages = (2, 1024, 4, 5) if num_rows == 1 else (64, 128, 4, 4)
    inner = min(inner, power_of_two(in_features, 16))
    while inner > 32 and 2 * inner * (2 * columns + rows) * min(num_stages, 3) > shared_memory:
        inner //= 2
    num_stages = min(num_stages, shared_memory // (2 * inner * (2 * columns + rows)))
    return SkinnyGemmTiles(rows, columns, inner, 1, num_warps, num_stages)


def _skinny_gemm_choice(num_rows: int, out_features: int, processors: int) -> tuple[tuple[int, int, int, int], int]:
    """Columns, inner, num_warps and num_stages of tiles, and the programs per multiprocessor to split parts for."""
    share = out_features / processors  # rows of the weight per multiprocessor
    if num_rows == 1:
        return ((4, 1024, 4, 5) if share > 128 else (8, 512, 4, 4)), 3
    if num_rows <= 16:
        if share > 512:
            return (128, 128, 4, 4), 1
        if share > 128:
            return (64, 128, 4, 5), 1
        if share > 42:
            return (64, 256, 4, 4), 1
        if num_rows <= 8:
            return (16, 512, 2, 4), 2
        return ((32, 256, 2, 4), 2) if share > 32 else ((32, 256, 4, 5), 1)
    if num_rows <= 32:
        return ((128, 128, 8, 4) if share > 512 else (64, 128, 4, 4) if share > 128 else (64, 128, 4, 6)), 1
    return ((128, 128, 8, 4) if share > 128 else (64, 128, 4, 4)), 1
