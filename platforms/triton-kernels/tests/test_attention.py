"""Attention and KV writes against exact attention in float64, with core's cases: ragged batches, padding, block tables
with invalid unused entries, slots with NaN from an earlier request."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random

import pytest
import torch

from mvllm.testing.attention_cases import expected, make_case, make_spec, run, tolerance

interpreted = importlib.import_module("platforms.triton-kernels.tests.interpreted")

# Cases of exhaustive runs only: the interpreter takes about 0.3 s for each.
more = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
DTYPES = ("float32", "bfloat16", "float16")

# (tokens computed before, new tokens): a prompt, decodes and a chunk in one batch, with lengths near block boundaries.
MIXED = [(0, 19), (47, 1), (15, 1), (16, 5), (0, 1)]
DECODES = [(47, 1), (15, 1), (0, 1), (130, 1)]


def check_against_exact(
    spec, requests, *, block_size=16, splits=None, codes=False, spread=1.0, padding=3, padding_requests=2, spans=None
):
    case = make_case(
        spec,
        requests,
        block_size=block_size,
        padding=padding,
        padding_requests=padding_requests,
        spread=spread,
        spans=spans,
    )
    backend = interpreted.TritonAttention(spec, splits=splits, codes=codes)
    found = run(backend, interpreted.runtime(), case)
    assert found.dtype == case.query.dtype
    real = case.num_real_tokens
    error = (found[:real].double() - expected(case)).abs().max().item()
    assert error < tolerance(spec.dtype, spec.kv_dtype)  # also fails for NaN
    assert not found[real:].any()


@pytest.mark.exhaustive
def test_a_mixed_batch():
    check_against_exact(make_spec(), MIXED)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"q": torch.zeros(1, 3, 8)}, "do not divide among 2"),
        ({"q": torch.zeros(1, 4, 16)}, "do not fit together"),
        ({"q": torch.zeros(1, 4, 8, dtype=torch.float64)}, "not torch.float64"),
        ({"v_cache": torch.zeros(2, 4, 2, 8).half()}, "must be of one dtype"),
        ({"k_cache": torch.zeros(2, 4, 8, 2).transpose(2, 3)}, "must be contiguous"),
        (
            {
                "k_cache": torch.zeros(2, 4, 2, 8).byte(),
                "v_cache": torch.zeros(2, 4, 2, 8).byte(),
                "float8": torch.int8,
            },
            "Codes",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_invalid_arguments_are_rejected(wrong, message):
    cache, table = torch.zeros(2, 4, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
    given = {"q": torch.zeros(1, 4, 8), "k_cache": cache, "v_cache": cache, "block_table": table, **wrong}
    lens = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        interpreted.mvllm_triton.attention.paged_attention(
            **given,
            query_start_loc=torch.arange(2, dtype=torch.int32),
            seq_lens=lens,
            scale=1.0,
            max_query_len=1,
            max_seq_len=1,
        )


@pytest.mark.parametrize(
    "dtype, splits",
    [*((dtype, 1) for dtype in DTYPES), ("float32", 3), ("bfloat16", 3), more("float16", 3)],
)
def test_every_dtype_with_and_without_splits(dtype, splits):
    check_against_exact(make_spec(head_size=32, dtype=dtype), MIXED, splits=splits)


def test_the_hosts_lengths_may_be_upper_bounds():
    spec = make_spec(head_size=16)
    case = make_case(spec, [(0, 3), (9, 1), (3, 2)], block_size=16)
    layout = dataclasses.replace(case.layout, max_query_len=100, max_seq_len=1)
    found = run(interpreted.TritonAttention(spec), interpreted.runtime(), dataclasses.replace(case, layout=layout))
    assert (found.double() - expected(case)).abs().max() < tolerance("float32", "float32")


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "requests",
    [
        [(90, 1), (0, 1), (15, 1)],  # decodes
        [(90, 4), (0, 1), (15, 8)],  # decodes with draft tokens
        more([(90, 4), (0, 9), (15, 1)]),  # and one request with more tokens than a decode
        [(20, 17)],  # one prompt
        more([(0, 70), (20, 40)]),  # prompts only
    ],
    ids=str,
)
def test_kinds_of_batches(requests, splits):
    check_against_exact(make_spec(head_size=16), requests, splits=splits)
    if len(requests) == 1:
        check_against_exact(make_spec(head_size=16), requests, splits=splits, padding=0, padding_requests=0)


@pytest.mark.parametrize("head_size", [80, more(96), more(128), 256, 512])
def test_head_sizes_that_are_and_are_not_powers_of_two(head_size):
    check_against_exact(make_spec(2, 1, head_size), [(0, 5), (30, 1)])


@pytest.mark.parametrize("heads", [more((1, 1)), more((3, 1)), (14, 2), more((4, 4)), more((40, 2)), (71, 1)])
def test_grouped_query_attention(heads):
    check_against_exact(make_spec(*heads, 16), [(0, 3), (17, 1)])


@pytest.mark.parametrize("block_size", [1, more(4), more(32), 128])
def test_block_sizes(block_size):
    check_against_exact(make_spec(head_size=16), MIXED, block_size=block_size)


@pytest.mark.parametrize(
    "features, splits",
    [
        ({"sliding_window": 1}, 1),
        more({"sliding_window": 1}, 4),
        more({"sliding_window": 20}, 1),
        more({"sliding_window": 20}, 4),
        ({"soft_cap": 3.0}, 1),
        more({"soft_cap": 3.0}, 4),
        ({"sinks": True}, 1),
        more({"sinks": True}, 4),
        more({"sliding_window": 20, "soft_cap": 3.0, "sinks": True}, 1),
        ({"sliding_window": 20, "soft_cap": 3.0, "sinks": True}, 4),
        more({"scale": 0.7}, 4),
        ({"value_head_size": 24}, 1),
        more({"value_head_size": 24}, 4),
    ],
    ids=str,
)
def test_features(features, splits):
    check_against_exact(make_spec(head_size=32, **features), MIXED, splits=splits)


@pytest.mark.parametrize(
    "dtype, kv_dtype, codes",
    [
        ("float32", "int8", False),
        more("float32", "float8_e4m3fn", False),
        more("float32", "float8_e4m3fn", True),
        more("bfloat16", "int8", False),
        ("bfloat16", "float8_e4m3fn", False),
        more("bfloat16", "float8_e4m3fn", True),
        more("float16", "int8", False),
        more("float16", "float8_e4m3fn", False),
        ("float16", "float8_e4m3fn", True),
    ],
)
def test_8_bit_caches_with_a_scale_per_token_and_head(dtype, kv_dtype, codes):
    check_against_exact(make_spec(head_size=24, dtype=dtype, kv_dtype=kv_dtype), MIXED, codes=codes)


@pytest.mark.parametrize(
    "kv_dtype, splits",
    [
        ("float32", 1),
        more("float32", 2),
        more("int8", 1),
        more("int8", 2),
        more("float8_e4m3fn", 1),
        ("float8_e4m3fn", 2),
    ],
)
def test_latent_attention(kv_dtype, splits):
    spec = make_spec(4, 1, 40, kv_dtype=kv_dtype, value_head_size=24, values_in_keys=True)
    check_against_exact(spec, MIXED, splits=splits)


def test_many_heads_over_one_latent():
    check_against_exact(make_spec(70, 1, 48, value_head_size=32, values_in_keys=True), [(20, 1), (0, 2)])


@pytest.mark.parametrize("splits", [1, more(2)])
@pytest.mark.parametrize("latent", [False, more(True)])
def test_tiles_of_keys_with_and_without_a_causal_mask(latent, splits):
    spec = make_spec(2, 1, 32 if latent else 16, value_head_size=16, values_in_keys=latent)
    check_against_exact(spec, [(30, 100), (130, 1), (62, 3)], splits=splits)


SPANS = [((30, 100), [(34, 125)]), ((130, 1), [(3, 9)]), ((20, 9), [(10, 26)])]
"""A span over several tiles, one before the step, and the rest of one."""


@pytest.mark.parametrize(
    "features, splits",
    [
        ({}, 1),
        ({"sliding_window": 20}, 3),
        more({}, 3),
        more({"sliding_window": 20}, 1),
        more({"sliding_window": 70, "soft_cap": 3.0, "sinks": True}, 3),
        more({"kv_dtype": "int8"}, 1),
        more({"dtype": "bfloat16"}, 3),
        more({"num_heads": 14}, 1),
        more({"num_heads": 4, "num_kv_heads": 1, "head_size": 40, "value_head_size": 24, "values_in_keys": True}, 1),
    ],
    ids=str,
)
def test_tokens_of_a_span_see_all_of_it(features, splits):
    spec = make_spec(**{"head_size": 16, "non_causal_spans": True, **features})
    requests, spans = zip(*SPANS, strict=True)
    check_against_exact(spec, requests, splits=splits, spans=spans)


@pytest.mark.parametrize("splits", [1, more(3)])
def test_spans_of_a_few_tokens(splits):
    """In the short launch."""
    spec = make_spec(head_size=16, non_causal_spans=True)
    check_against_exact(spec, [(90, 3), (0, 1), (15, 4)], splits=splits, spans=[[(80, 92)], [], [(15, 18)]])


def test_keys_of_decodes_are_split_among_programs():
    check_against_exact(make_spec(head_size=16), DECODES, splits=7)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 keys, so that short sequences have many."""
    attention = interpreted.mvllm_triton.attention
    usual = attention.attention_tiles
    monkeypatch.setattr(
        attention, "attention_tiles", lambda *args, **options: dataclasses.replace(usual(*args, **options), columns=16)
    )


@pytest.mark.parametrize("splits", [more(2), 5, more(40)])
@pytest.mark.parametrize(
    "requests, features",
    [
        ([(200, 1), (3, 1), (0, 1), (90, 1)], {"sinks": True}),  # one request with most of the keys
        more([(3, 1), (90, 4), (200, 2)], {}),
        ([(3, 1), (120, 12), (0, 20), (90, 1)], {"sliding_window": 50}),  # both launches
        more([(3, 1), (200, 12), (0, 40), (90, 1)], {"sinks": True, "soft_cap": 3.0}),
        more([(100, 40)], {"sliding_window": 33}),
        more([(100, 1), (90, 20)], {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"}),
    ],
    ids=str,
)
def test_uneven_requests_divided_among_programs(requests, features, splits, small_tiles):
    check_against_exact(make_spec(head_size=16, **features), requests, block_size=8, splits=splits)


def test_programs_share_the_keys_of_a_latent(small_tiles):
    spec = make_spec(4, 1, 40, value_head_size=24, values_in_keys=True)
    check_against_exact(spec, [(100, 1), (3, 1), (40, 1)], splits=5)


def test_keys_of_a_long_context_are_split_by_default():
    check_against_exact(make_spec(2, 2, 16), [(300, 1)], spread=2.0)


@pytest.mark.parametrize("seed", [*range(3), *(more(seed) for seed in range(3, 60))])
def test_random_steps(seed):
    """Random layers and steps, with lengths near the boundaries of blocks and tiles."""
    rng = random.Random(seed)
    dtype = rng.choice(DTYPES)
    fields = {"dtype": dtype, "kv_dtype": rng.choice((dtype, dtype, dtype, "int8", "float8_e4m3fn"))}
    if rng.random() < 0.2:
        heads = (rng.choice((1, 5, 16)), 1)
        size, value_size = rng.choice(((40, 24), (80, 64), (24, 8), (576, 512)))
        fields |= {"value_head_size": value_size, "values_in_keys": True}
    else:
        kv_heads, size = rng.choice((1, 2, 3)), rng.choice((16, 24, 64, 80, 96, 128, 192, 256, 512))
        heads = (kv_heads * rng.choice((1, 2, 3, 5, 7, 8, 12, 16)), kv_heads)
    if rng.random() < 0.4:
        fields["sliding_window"] = rng.choice((1, 2, 15, 16, 17, 33, 64))
    if rng.random() < 0.3:
        fields["soft_cap"] = rng.choice((0.5, 3.0, 30.0))
    fields["sinks"] = rng.random() < 0.3
    most = rng.choice((1, 1, 8, 40))
    requests = [
        (max(0, rng.choice((0, 16, 32, 64, 128)) + rng.randint(-2, 2)), rng.randint(1, most))
        for _ in range(rng.randint(1, 4))
    ]
    check_against_exact(
        make_spec(*heads, size, **fields),
        requests,
        block_size=rng.choice((8, 16, 32, 64)),
        splits=rng.choice((None, 1, 3, 33)),
        codes=rng.random() < 0.5,
        padding=rng.choice((0, 1, 17)),
        padding_requests=rng.choice((0, 1, 5)),
    )
