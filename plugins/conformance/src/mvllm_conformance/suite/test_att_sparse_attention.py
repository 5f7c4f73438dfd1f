"""ATT: sparse attention: the selection of an indexer, and attention over selected positions only."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mvllm.extension_api.testing import checked_attention_backend, torch_dtype
from mvllm.plugin_api import AttentionSpec, DeviceRuntime, PlatformError
from mvllm_conformance.attention_cases import Case, make_case, make_spec, store, stored, tolerance
from mvllm_conformance.markers import clause
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.suite.test_att_attention import FEW, backend_for, grid, requests_of
from mvllm_conformance.tensor_assertions import assert_close, assert_equal

TOP_K = (8, 128)
"""Fewer positions than most sequences of the batches have, and more than most have."""


def make_indexer_spec(dtype: str, top_k: int) -> AttentionSpec:
    return make_spec(
        4, 1, 32, dtype, scale=1.0, value_head_size=32, values_in_keys=True, index_topk=top_k, indexer=True
    )


def make_sparse_spec(dtype: str, top_k: int, kv_dtype: str | None = None) -> AttentionSpec:
    return make_spec(
        4, 1, 80, dtype, kv_dtype=kv_dtype or dtype, value_head_size=64, values_in_keys=True, index_topk=top_k
    )


def query_positions(case: Case) -> list[tuple[int, int]]:
    """Request and position of each real token of the step."""
    return [(r, p) for r, (before, new) in enumerate(case.requests) for p in range(before, before + new)]


@clause("ATT-15")
@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("batch", grid(FEW))
def test_the_positions_with_the_highest_scores_are_selected(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, batch: str, top_k: int
) -> None:
    """Small integers: every dtype computes the scores exactly, and many of them are equal."""
    spec, dtype = make_indexer_spec(claimed_dtype, top_k), torch_dtype(claimed_dtype)
    backend = backend_for(subject, spec)
    requests = requests_of(subject, batch)
    case = make_case(spec, requests, block_size=backend.kv_layout().block_sizes[0], padding=5, padding_requests=2)
    generator = torch.Generator().manual_seed(1)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    case = replace(case, keys=[integers(*key.shape) for key in case.keys], query=integers(*case.query.shape))
    case.values = case.keys
    weights = integers(case.layout.num_tokens, spec.num_heads).float()
    harness, metadata, query = store(backend, bound_device, case, poison=math.nan)
    selected = backend.select(query, bound_device.to_device(weights), harness.kv, metadata)
    found = bound_device.to_host(selected).wait()
    assert found.shape == (case.layout.num_tokens, top_k) and found.dtype == torch.int32
    for token, (request, position) in enumerate(query_positions(case)):
        seen = case.keys[request][: position + 1, 0].double()
        products = (case.query[token].double() @ seen.T).relu()
        scores = (weights[token].double() @ products).tolist()
        best = sorted(range(position + 1), key=lambda at: (-scores[at], at))[:top_k]
        row = found[token].tolist()
        what = f"token {token}, at position {position} of request {request}"
        assert row[len(best) :] == [-1] * (top_k - len(best)), f"{what}: the end of its row is {row[len(best) :]}"
        wrong = sorted({*row[: len(best)]} ^ {*best})
        assert not wrong, f"{what}: {wrong} are selected or missing; scores {[scores[at] for at in wrong]}"


def draw_positions(case: Case, top_k: int) -> torch.Tensor:
    """Random visible positions for each token in random order: int32 [T, top_k]; of some tokens fewer than possible."""
    generator = torch.Generator().manual_seed(2)
    positions = torch.full((case.layout.num_tokens, top_k), -1, dtype=torch.int32)
    for token, (_, position) in enumerate(query_positions(case)):
        count = min(top_k, position + 1) if token % 3 else 1 + position % top_k % (position + 1)
        positions[token, :count] = torch.randperm(position + 1, generator=generator)[:count].int()
    return positions


def exact(case: Case, positions: torch.Tensor) -> torch.Tensor:
    """Exact attention over these positions: float64 [real tokens, num_heads * value_size]."""
    spec, rows = case.spec, []
    for token, (request, _) in enumerate(query_positions(case)):
        chosen = positions[token][positions[token] >= 0].long()
        keys = stored(case.keys[request], spec.kv_dtype)[chosen, 0]
        weights = torch.softmax(case.query[token].double() @ keys.T * spec.scale, dim=-1)
        rows.append((weights @ keys[:, : spec.value_size]).flatten())
    return torch.stack(rows)


def assert_attends_to_selected(
    subject: PlatformUnderTest, runtime: DeviceRuntime, spec: AttentionSpec, requests: list[tuple[int, int]]
) -> None:
    assert spec.index_topk is not None
    backend = backend_for(subject, spec)
    case = make_case(spec, requests, block_size=backend.kv_layout().block_sizes[0], padding=5, padding_requests=2)
    positions = draw_positions(case, spec.index_topk)
    harness, metadata, query = store(backend, runtime, case, poison=math.nan)
    result = backend.forward_selected(query, harness.kv, metadata, runtime.to_device(positions))
    found = runtime.to_host(result).wait()
    assert found.shape == (case.layout.num_tokens, spec.num_heads * spec.value_size)
    assert found.dtype == torch_dtype(spec.dtype) and torch.isfinite(found).all()
    real = found[: case.num_real_tokens].double()
    allowed = tolerance(spec.dtype, spec.kv_dtype)
    assert_close(real, exact(case, positions), allowed, f"attention over {spec.index_topk} positions, by token")


@clause("ATT-16")
@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("batch", grid(FEW))
def test_a_query_attends_to_the_given_positions_only(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, batch: str, top_k: int
) -> None:
    spec = make_sparse_spec(claimed_dtype, top_k)
    assert_attends_to_selected(subject, bound_device, spec, requests_of(subject, batch))


@clause("ATT-16")
def test_selected_positions_are_read_in_every_storage_dtype(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    for kv_dtype in subject.capabilities.kv_dtypes:
        spec = make_sparse_spec(claimed_dtype, 16, kv_dtype)
        try:
            checked_attention_backend(subject.platform, spec)
        except PlatformError:
            assert kv_dtype != claimed_dtype
            continue
        assert_attends_to_selected(subject, bound_device, spec, requests_of(subject, "prompts and decodes"))


@clause("ATT-16")
def test_all_visible_positions_give_the_same_as_attention_without_a_selection(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    spec = make_sparse_spec(claimed_dtype, 64)
    backend, dense = backend_for(subject, spec), backend_for(subject, replace(spec, index_topk=None))
    requests = requests_of(subject, "one prompt")
    case = make_case(spec, requests, block_size=backend.kv_layout().block_sizes[0])
    (_, length), at = requests[0], torch.arange(spec.index_topk or 0).int()
    positions = torch.where(at <= torch.arange(length).unsqueeze(1), at, -1).int()
    harness, metadata, query = store(backend, bound_device, case)
    found = backend.forward_selected(query, harness.kv, metadata, bound_device.to_device(positions))
    harness, metadata, query = store(dense, bound_device, case)
    wanted = dense.forward(query, harness.kv, metadata)
    results = [bound_device.to_host(result).wait().float() for result in (found, wanted)]
    assert_close(results[0], results[1], 2 * tolerance(claimed_dtype, claimed_dtype), "attention to all positions")


@clause("ATT-15")
def test_a_selection_does_not_depend_on_how_a_prompt_is_cut(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    """As far as scores are exact: small integers again."""
    if not (subject.capabilities.chunked_prefill or subject.capabilities.prefix_caching):
        pytest.skip("not claimed: chunked_prefill, prefix_caching")
    spec, dtype = make_indexer_spec(claimed_dtype, 8), torch_dtype(claimed_dtype)
    backend = backend_for(subject, spec)
    generator = torch.Generator().manual_seed(3)
    keys = torch.randint(-2, 3, (70, 1, 32), generator=generator).to(dtype)
    query = torch.randint(-2, 3, (70, 4, 32), generator=generator).to(dtype)
    weights = torch.randint(-2, 3, (70, 4), generator=generator).float()

    def selected(first: int, end: int) -> torch.Tensor:
        case = make_case(spec, [(first, end - first)], block_size=backend.kv_layout().block_sizes[0])
        case = replace(case, keys=[keys[:end]], values=[keys[:end]], query=query[first:end])
        harness, metadata, queries = store(backend, bound_device, case)
        found = backend.select(queries, bound_device.to_device(weights[first:end]), harness.kv, metadata)
        return bound_device.to_host(found).wait().sort(dim=-1).values

    whole = selected(0, 70)
    for first, end in ((0, 17), (17, 18), (18, 69), (69, 70)):
        assert_equal(selected(first, end), whole[first:end], f"the selection of tokens {first} to {end}")


@clause("ATT-15", "ATT-16", refusal=True)
def test_sparse_attention_that_is_not_claimed_is_refused(
    subject: PlatformUnderTest, bound_device: DeviceRuntime
) -> None:
    dtype = subject.capabilities.dtypes[0]
    for spec in (make_sparse_spec(dtype, 24), make_indexer_spec(dtype, 24)):
        with pytest.raises(PlatformError, match=r"sparse_attention.*Set max_model_len to at most 24"):
            checked_attention_backend(subject.platform, spec)
