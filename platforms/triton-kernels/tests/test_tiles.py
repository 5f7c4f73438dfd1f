"""Tile sizes: the kernels' assumptions hold for all shapes that models have."""

from __future__ import annotations

import itertools

import pytest

from mvllm_triton import tiles


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("shared_memory", [64 << 10, 99 << 10, 227 << 10])
def test_attention_tiles_hold_at_least_one_token_and_fit_in_memory(itemsize, latent, shared_memory):
    sizes = (16, 33, 64, 80, 128, 192, 256, 512)
    for size, block, group, length in itertools.product(sizes, (1, 16, 256), (1, 3, 8, 71, 128), (1, 2, 70, 4096)):
        found = tiles.attention_tiles(
            size, block, itemsize, group, length, latent=latent, shared_memory=shared_memory
        )  # fmt: skip
        assert found.tokens >= 1 and found.heads <= group
        assert found.tokens * found.heads <= found.rows
        assert found.rows & (found.rows - 1) == found.columns & (found.columns - 1) == 0
        assert min(found.rows, found.columns) >= 16  # the smallest tile that the hardware multiplies
        key_tile = found.columns * tiles.power_of_two(size) * itemsize
        assert (1 if latent else 2) * key_tile <= 64 << 10
        if shared_memory > 200 << 10 and itemsize == 2:
            assert 2 * (1 if latent else 2) * key_tile + found.rows * tiles.power_of_two(size) * 2 <= shared_memory


def test_a_long_prompt_gets_more_rows_than_a_decode():
    decode = tiles.attention_tiles(128, 16, 2, 4, 1)
    prompt = tiles.attention_tiles(128, 16, 2, 4, 2048)
    assert (decode.rows, prompt.rows) == (16, 128)
    assert (decode.tokens, prompt.tokens) == (4, 32)


def test_more_shared_memory_gives_more_keys_in_flight():
    small, large = (tiles.attention_tiles(128, 16, 2, 4, 1, shared_memory=n << 10) for n in (64, 227))
    assert (small.columns, large.columns) == (32, 64)
    small, large = (tiles.attention_tiles(128, 16, 2, 4, 2048, shared_memory=n << 10) for n in (64, 227))
    assert (small.num_stages, large.num_stages) == (2, 3)
    small, large = (tiles.attention_tiles(512, 16, 2, 2, 2048, shared_memory=n << 10) for n in (64, 227))
    assert (small.rows, large.rows) == (32, 64)


def test_wide_heads_and_an_8_bit_cache_take_fewer_rows_where_registers_hold_the_operands():
    def rows(head_size: int, kib: int, narrow: bool) -> int:
        return tiles.attention_tiles(head_size, 16, 2, 8, 2048, narrow=narrow, shared_memory=kib << 10).rows

    assert [rows(256, kib, narrow=True) for kib in (160, 163, 227)] == [64, 64, 128]
    assert rows(256, 163, narrow=False) == rows(128, 163, narrow=True) == 128


def test_wide_warps_make_programs_of_as_many_threads():
    narrow, wide = (tiles.attention_tiles(128, 16, 2, 4, 2048, warp_size=n) for n in (32, 64))
    assert (narrow.num_warps, wide.num_warps) == (8, 4)


def test_a_decode_has_four_programs_per_processor_if_its_keys_allow():
    assert tiles.short_work(64, 8, 128, 132, 1 << 13).programs * 8 >= 4 * 132
    assert tiles.short_work(17, 8, 128, 132, 1 << 13).programs * 8 >= 4 * 132
    assert tiles.short_work(1, 8, 128, 132, 1 << 13).programs == 64  # two tiles each
    one = tiles.short_work(1, 8, 2, 132, 1 << 13)
    assert (one.programs, one.num_partials, one.divided_tiles) == (1, 0, 0)  # too few keys to divide
    limited = tiles.short_work(64, 8, 128, 132, 1 << 20)
    assert limited.num_partials * 8 << 20 <= tiles.PARTIAL_BYTES


def test_prompts_are_divided_if_their_tiles_are_few_and_their_keys_are_many():
    whole = tiles.long_work(8192, 1, 32, 8, 128, 132, 1 << 16)
    assert (whole.programs, whole.num_partials) == (1, 0)  # enough tiles already
    assert tiles.long_work(64, 1, 32, 8, 1600, 132, 1 << 16).programs == 17
    assert tiles.long_work(64, 1, 32, 8, 4, 132, 1 << 16).num_partials == 0  # too few keys
    assert tiles.long_work(512, 8, 32, 8, 1600, 132, 1 << 16).num_partials > 0  # the lengths of several are not known


@pytest.mark.parametrize("value_size", [16, 128, 512])
@pytest.mark.parametrize("rows", [1, 4, 128])
def test_a_program_that_reduces_holds_at_most_64_elements_per_thread(rows, value_size):
    found = tiles.combining_tile(value_size, rows)
    assert found[0] * found[1] * value_size <= 128 * 64


@pytest.mark.parametrize("size", [5, 1024, 151936])
@pytest.mark.parametrize("rows", [1, 64, 5000])
def test_pieces_of_rows_cover_them(rows, size):
    piece, block = tiles.argmax_piece(rows, size)
    assert piece % block == 0
    assert -(-size // piece) <= tiles.power_of_two(-(-size // block))  # the capacity of the second kernel


def test_expert_tiles_have_the_average_number_of_rows():
    assert [tiles.expert_tiles(n, 64, 2).rows for n in (8, 64, 2048, 16384)] == [16, 16, 32, 128]


@pytest.mark.parametrize("memory", [64 << 10, 227 << 10])
def test_tiles_of_few_rows_fit_in_memory_and_are_split_only_if_they_are_few(memory):
    for rows, out, inside in itertools.product((1, 2, 9, 17, 64), (64, 768, 4096, 28672, 128256), (16, 2048, 14336)):
        found = tiles.skinny_gemm_tiles(rows, out, inside, 132, memory)
        assert found.num_stages >= 2 and found.rows >= rows
        assert found.num_stages * found.inner * (found.columns + found.rows) * 2 <= memory
        assert found.inner * (found.parts - 1) < inside, "every part has columns"
        assert found.parts == 1 or -(-out // found.columns) * found.parts <= 3 * 132


def test_tiles_of_few_rows_follow_the_measurements():
    def found(rows, out, inside):
        choice = tiles.skinny_gemm_tiles(rows, out, inside, 132, 227 << 10)
        return choice.columns, choice.inner, choice.num_warps, choice.num_stages, choice.parts

    assert found(1, 4096, 14336) == (8, 512, 4, 4, 1)
    assert found(1, 28672, 4096) == (4, 1024, 4, 5, 1)
    assert found(8, 4096, 4096) == (16, 512, 2, 4, 1)
    assert found(16, 4096, 4096) == (32, 256, 4, 5, 1)
    assert found(16, 6144, 4096) == (64, 256, 4, 4, 1)
    assert found(16, 28672, 4096) == (64, 128, 4, 5, 1)
    assert found(32, 4096, 14336) == (64, 128, 4, 6, 2)
    assert found(64, 128256, 4096) == (128, 128, 8, 4, 1)


@pytest.mark.parametrize("shared_memory", [99 << 10, 163 << 10, 227 << 10])
def test_latents_of_8_bit_caches_have_few_rows_and_many_threads(shared_memory):
    for group, length in ((16, 1), (16, 2048), (128, 1), (128, 2048)):
        found = tiles.attention_tiles(
            512, 16, 2, group, length, latent=True, narrow=True, shared_memory=shared_memory
        )  # fmt: skip
        assert found.rows <= 32 and found.columns == 32 and found.num_warps == 8
    wide = tiles.attention_tiles(512, 16, 2, 128, 1, latent=True, shared_memory=227 << 10)
    assert (wide.rows, wide.num_warps) == (64, 8)  # rows for a group of warps


def test_int4_weights_that_are_multiplied_from_registers_have_narrow_tiles():
    assert [tiles.quantized_tiles(2048, 6144, 2, unpacked_in_registers=n).columns for n in (False, True)] == [128, 64]
    assert tiles.quantized_tiles(16, 1024, 2, unpacked_in_registers=True).columns == 32
    columns = {
        (gated, bits): tiles.packed_expert_tiles(65536, 128, 2, gated=gated, unpacked_bits=bits).columns
        for gated in (False, True)
        for bits in (0, 4, 8)
    }
    assert [columns[False, bits] for bits in (0, 4, 8)] == [128, 64, 128]
    assert [columns[True, bits] for bits in (0, 4, 8)] == [64, 64, 32]
