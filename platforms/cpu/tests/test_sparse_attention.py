"""Sparse attention: selections are those of the reference, and attention over selected positions is exact."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from platforms.cpu.tests.dense_attention import as_stored, runtime
from platforms.cpu.tests.test_paged_attention import TOLERANCE

from mvllm.attention.reference import ReferenceAttention
from mvllm.attention.selection import best_positions
from mvllm.ops.dtypes import torch_dtype
from mvllm.testing.attention_cases import Case, make_case, make_spec, store
from mvllm_cpu import kernels
from mvllm_cpu.platform import make_platform

pytestmark = pytest.mark.skipif(kernels.load().library is None, reason=f"no kernels: {kernels.load().reason}")

KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
MIXED = [(0, 37), (100, 1), (15, 1), (16, 1), (200, 5), (0, 1), (33, 70), (700, 1)]
"""(tokens computed before, new tokens): prompts, decodes, and rows that verify draft tokens."""


def indexer(top_k: int, dtype: str = "float32", *, heads: int = 16, size: int = 32, kv_dtype: str | None = None):
    fields = {"value_head_size": size, "values_in_keys": True, "index_topk": top_k, "indexer": True}
    return make_spec(heads, 1, size, dtype, kv_dtype=kv_dtype or dtype, **fields)


def sparse(top_k: int, dtype: str = "float32", *, heads: int = 5, sizes=(80, 64), kv_dtype: str | None = None):
    fields = {"value_head_size": sizes[1], "values_in_keys": True, "index_topk": top_k}
    return make_spec(heads, 1, sizes[0], dtype, kv_dtype=kv_dtype or dtype, **fields)


def weights_of(case: Case) -> torch.Tensor:
    return torch.randn(case.layout.num_tokens, case.spec.num_heads, generator=torch.Generator().manual_seed(9))


def with_integers(case: Case) -> Case:
    """Small integers and a scale of a power of two, so that scores are exact in every dtype and many are equal."""
    generator, dtype = torch.Generator().manual_seed(1), torch_dtype(case.spec.dtype)
    draw = functools.partial(torch.randint, -2, 3, generator=generator)
    keys = [draw(key.shape).to(dtype) for key in case.keys]
    spec = dataclasses.replace(case.spec, scale=0.25)
    return dataclasses.replace(case, spec=spec, keys=keys, values=keys, query=draw(case.query.shape).to(dtype))


def select(case: Case, weights: torch.Tensor, backend_type=None) -> torch.Tensor:
    backend = make_platform().attention_backend(case.spec) if backend_type is None else backend_type(case.spec)
    harness, metadata, query = store(backend, runtime(), case, poison=torch.nan)
    return backend.select(query, weights, harness.kv, metadata)


def attend(case: Case, positions: torch.Tensor) -> torch.Tensor:
    backend = make_platform().attention_backend(case.spec)
    harness, metadata, query = store(backend, runtime(), case, poison=torch.nan)
    return backend.forward_selected(query, harness.kv, metadata, positions)


def attend_exactly(case: Case, positions: torch.Tensor) -> torch.Tensor:
    rows, token = [], 0
    for r, (_, new) in enumerate(case.requests):
        stored = as_stored(case.keys[r], case.spec.kv_dtype)[:, 0]
        for _ in range(new):
            keys = stored[positions[token][positions[token] >= 0].long()]
            weights = torch.softmax(case.query[token].double() @ keys.T * case.spec.scale, dim=-1)
            rows.append((weights @ keys[:, : case.spec.value_size]).flatten())
            token += 1
    return torch.stack(rows)


def draw_positions(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    places = [p for before, new in case.requests for p in range(before, before + new)]
    drawn = torch.full((len(places), case.spec.index_topk), -1, dtype=torch.int32)
    for token, last in enumerate(places):
        count = min(case.spec.index_topk, last + 1) if token % 3 else 1 + last % case.spec.index_topk % (last + 1)
        drawn[token, :count] = torch.randperm(last + 1, generator=generator)[:count].int()
    return drawn


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("top_k", [1, 8, 128, 700])
def test_selections_are_those_of_the_reference_with_equal_scores(dtype, top_k, threads):
    for block_size in (16, 128):
        case = with_integers(make_case(indexer(top_k, dtype), MIXED, block_size=block_size))
        weights = weights_of(case).mul(2).round()
        expected = select(case, weights, ReferenceAttention).sort(dim=1).values
        found = select(case, weights)
        assert torch.equal(found.sort(dim=1).values, expected)
        ends = found.diff(dim=1)
        assert ((ends > 0) | (found[:, 1:] == -1)).all()  # ascending, then -1


def test_lengths_around_the_number_of_selected_positions(threads):
    """A query that sees k - 1, k, k + 1 or k + 2 positions, alone and as the last of a prompt."""
    for top_k in (16, 33):
        seen = [(top_k + d - new, new) for d in (-1, 0, 1, 2) for new in (1, 3, 11)]
        case = with_integers(make_case(indexer(top_k), seen, block_size=16))
        weights = weights_of(case).round()
        expected = select(case, weights, ReferenceAttention)
        assert torch.equal(select(case, weights).sort(dim=1).values, expected.sort(dim=1).values)


@pytest.mark.parametrize("value", [0.0, -1.0, 1.0])
def test_of_nothing_but_equal_scores_the_first_positions_are_selected(value):
    case = make_case(indexer(20), [(150, 3), (19, 1), (20, 1), (0, 30)], block_size=16)
    keys = [torch.ones_like(key) for key in case.keys]
    case = dataclasses.replace(case, keys=keys, values=keys, query=torch.full_like(case.query, value))
    found = select(case, torch.ones(case.layout.num_tokens, 16))
    assert torch.equal(found[:5], torch.arange(20).int().expand(5, 20))
    assert found[5].tolist() == [0] + [-1] * 19


def test_scores_of_zero_with_either_sign_are_equal():
    case = make_case(indexer(3, heads=1, size=4), [(9, 1)], block_size=16)
    keys = torch.zeros_like(case.keys[0])
    keys[4, 0, 0], keys[7, 0, 0] = 1.0, 2.0  # with a negative weight, their scores are the lowest; others are -0.0
    case = dataclasses.replace(case, keys=[keys], values=[keys], query=torch.ones_like(case.query))
    assert select(case, torch.full((1, 1), -1.0)).tolist() == [[0, 1, 2]]
    assert select(case, torch.full((1, 1), 1.0)).tolist() == [[0, 4, 7]]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_selected_scores_are_the_highest_ones_in_every_storage_dtype(dtype, kv_dtype):
    """Real numbers: a position that the reference does not select has nearly the same score as one that it selects."""
    spec = indexer(24, dtype, heads=20, size=40, kv_dtype=kv_dtype)
    case = make_case(spec, [(0, 30), (300, 4), (77, 1)], block_size=32)
    weights, token = weights_of(case), 0
    found = select(case, weights)
    for r, (before, new) in enumerate(case.requests):
        keys = as_stored(case.keys[r], kv_dtype)[:, 0]
        for position in range(before, before + new):
            products = (case.query[token].double() @ keys[: position + 1].T * spec.scale).relu()
            scores = weights[token].double() @ products
            chosen = found[token][found[token] >= 0].long()
            assert len(chosen.unique()) == min(24, position + 1)
            missed = torch.ones(position + 1, dtype=torch.bool).index_fill_(0, chosen, False)
            if missed.any():
                assert scores[chosen].min() > scores[missed].max() - 1e-4 * scores.abs().max()
            token += 1


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_selection_depends_neither_on_the_cut_of_a_prompt_nor_on_the_batch_nor_on_threads(dtype):
    """To the bit, with real numbers: scores are added in one order."""
    spec = indexer(12, dtype, heads=9, size=40)
    whole = make_case(spec, [(0, 300)], block_size=16)
    weights = weights_of(whole)
    expected = select(whole, weights)
    before = torch.get_num_threads()
    for cuts, threads in (((0, 11, 22, 300), 1), ((0, 299, 300), 3), ((0, 12, 13, 14, 200, 300), 2)):
        torch.set_num_threads(threads)
        try:
            parts = []
            for begin, end in itertools.pairwise(cuts):
                case = make_case(spec, [(begin, end - begin), (33, 1), (200, 3)], block_size=16)
                keys = [whole.keys[0][:end], *case.keys[1:]]
                query = torch.cat((whole.query[begin:end], case.query[end - begin :]))
                case = dataclasses.replace(case, keys=keys, values=keys, query=query)
                parts.append(select(case, torch.cat((weights[begin:end], weights[:4])))[: end - begin])
        finally:
            torch.set_num_threads(before)
        assert torch.equal(torch.cat(parts), expected)


def test_scores_of_a_step_that_do_not_fit_into_one_pass():
    case = with_integers(make_case(indexer(64, heads=2, size=4), [(3000, 1500), (50, 20)], block_size=128))
    weights = weights_of(case).round()
    expected = select(case, weights, ReferenceAttention).sort(dim=1).values
    assert torch.equal(select(case, weights).sort(dim=1).values, expected)


def test_selections_with_nan_and_infinity_are_those_of_the_reference():
    case = make_case(indexer(5, heads=2, size=4), [(40, 1)], block_size=16)
    keys = case.keys[0].abs()
    keys[3], keys[9], keys[20] = torch.nan, torch.inf, 0.0
    case = dataclasses.replace(case, keys=[keys], values=[keys], query=torch.ones_like(case.query))
    for weights in (torch.ones(1, 2), -torch.ones(1, 2)):
        scores = weights @ (case.query[0] @ keys[:, 0].T * case.spec.scale).relu()
        expected = best_positions(torch.where(scores.isnan(), torch.nan, scores), 40, 5)
        assert torch.equal(select(case, weights), expected.sort(dim=1).values)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_over_selected_positions_is_exact(dtype, kv_dtype, threads):
    for heads, sizes, top_k in ((5, (80, 64), 40), (16, (576, 512), 300), (3, (33, 24), 8), (70, (48, 16), 150)):
        spec = sparse(top_k, dtype, heads=heads, sizes=sizes, kv_dtype=kv_dtype)
        case = make_case(spec, [(0, 7), (100, 1), (15, 1), (200, 5), (600, 1)], block_size=32, spread=0.5)
        positions = draw_positions(case)
        found = attend(case, positions).double()
        assert (found - attend_exactly(case, positions)).abs().max().item() < TOLERANCE[dtype]  # also fails for NaN


def test_attention_of_padding_rows_is_zero():
    case = make_case(sparse(16), [(30, 1), (5, 3)], block_size=16, padding=3, padding_requests=1)
    positions = torch.full((7, 16), 1 << 20, dtype=torch.int32)
    positions[:4] = draw_positions(case)
    found = attend(case, positions)
    assert (found[4:] == 0).all() and torch.isfinite(found).all()


def test_what_is_stored_of_a_token_takes_no_more_than_the_layout_says():
    for spec in (sparse(16), sparse(16, kv_dtype="int8"), sparse(16, "bfloat16", sizes=(576, 512)), indexer(16)):
        backend = make_platform().attention_backend(spec)
        kv = backend.allocate(3, 32, torch.device("cpu"))
        assert backend.kv_bytes(kv) == 3 * 32 * backend.kv_layout().bytes_per_token
