"""Tile sizes: the kernels' assumptions hold for all shapes that models have."""

from __future__ import annotations

import itertools

import pytest

from mvllm_triton import tiles


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("latent", [False, True])
def test_attention_tiles_hold_at_least_one_token_and_fit_in_memory(itemsize, latent):
    sizes = (16, 33, 64, 80, 128, 192, 256, 512)
    for size, block, group, length in itertools.product(sizes, (1, 16, 256), (1, 3, 8, 71, 128), (1, 2, 70, 4096)):
        found = tiles.attention_tiles(size, block, itemsize, group, length, latent=latent)
        assert found.tokens >= 1 and found.heads <= group
        assert found.tokens * found.heads <= found.rows
        assert found.rows & (found.rows - 1) == found.columns & (found.columns - 1) == 0
        assert min(found.rows, found.columns) >= 16  # the smallest tile that the hardware multiplies
        key_tile = found.columns * tiles.power_of_two(size) * itemsize
        assert key_tile <= (64 << 10 if latent else 32 << 10)


def test_a_long_prompt_gets_more_rows_than_a_decode():
    decode = tiles.attention_tiles(128, 16, 2, 4, 1)
    prompt = tiles.attention_tiles(128, 16, 2, 4, 2048)
    assert (decode.rows, prompt.rows) == (16, 128)
    assert (decode.tokens, prompt.tokens) == (4, 32)


def test_keys_are_split_if_programs_are_few_and_keys_are_many():
    one = tiles.num_splits(8, 8192, 64, 132, 1 << 14)
    assert 132 <= 8 * one <= 2 * 132
    assert tiles.num_splits(8 * 64, 8192, 64, 132, 1 << 20) == 1  # enough programs already
    assert tiles.num_splits(8, 100, 64, 132, 1 << 14) == 1  # too few keys to split
    assert tiles.num_splits(8, 1 << 20, 64, 132, 1 << 25) == 2  # the memory limit
    assert tiles.num_splits(1, 1 << 20, 64, 1000, 1 << 10) == tiles.MAX_SPLITS


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
        found = tiles.few_rows_tiles(rows, out, inside, 132, memory)
        assert found.num_stages >= 2 and found.rows >= rows
        assert found.num_stages * found.inner * (found.columns + found.rows) * 2 <= memory
        assert found.inner * (found.parts - 1) < inside, "every part has columns"
        assert found.parts == 1 or -(-out // found.columns) * found.parts <= 3 * 132


def test_tiles_of_few_rows_follow_the_measurements():
    def found(rows, out, inside):
        choice = tiles.few_rows_tiles(rows, out, inside, 132, 227 << 10)
        return choice.columns, choice.inner, choice.num_warps, choice.num_stages, choice.parts

    assert found(1, 4096, 14336) == (8, 512, 4, 4, 1)
    assert found(1, 28672, 4096) == (4, 1024, 4, 5, 1)
    assert found(8, 4096, 4096) == (16, 512, 2, 4, 1)
    assert found(16, 4096, 4096) == (32, 256, 4, 5, 1)
    assert found(16, 6144, 4096) == (64, 256, 4, 4, 1)
    assert found(16, 28672, 4096) == (64, 128, 4, 5, 1)
    assert found(32, 4096, 14336) == (64, 128, 4, 6, 2)
    assert found(64, 128256, 4096) == (128, 128, 8, 4, 1)
