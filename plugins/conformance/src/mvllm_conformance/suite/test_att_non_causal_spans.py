"""ATT: attention of prompts with spans whose tokens see each other in both directions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mvllm.extension_api.testing import checked_attention_backend
from mvllm.plugin_api import AttentionSpec, DeviceRuntime, PlatformError
from mvllm_conformance.attention_cases import make_case, make_spec, run
from mvllm_conformance.attention_diagnosis import assert_near
from mvllm_conformance.markers import clause, exhaustive, skip_not_claimed
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.suite.test_att_attention import HEADS, backend_for, claimed
from mvllm_conformance.tensor_assertions import assert_equal

Batch = list[tuple[tuple[int, int], list[tuple[int, int]]]]
"""For each request: tokens computed before the step and new ones, and its spans."""

BATCHES: dict[str, Batch] = {
    "a prompt": [((0, 45), [(5, 30)])],
    "spans at both ends, and two that adjoin": [((0, 70), [(0, 9), (20, 40), (40, 57), (60, 70)])],
    "prompts and decodes": [((40, 1), []), ((0, 20), []), ((0, 50), [(3, 45)]), ((0, 33), [(31, 33)])],
    "a span that is longer than a tile": [((3, 1), []), ((0, 420), [(10, 400)]), ((0, 5), [(1, 3)])],
    "rests of prompts": [((70, 1), [(4, 9)]), ((30, 40), [(8, 20), (35, 60)]), ((64, 64), [(64, 128)])],
    "the rest of a span": [((25, 30), [(10, 50)]), ((40, 9), [(2, 49)]), ((8, 1), [(2, 9)])],
}
EARLIER = {"rests of prompts", "the rest of a span"}
FEW = {"prompts and decodes", "the rest of a span"}


def grid(batches: set[str]) -> list[Any]:
    """Names of BATCHES as parameters; those not in `batches` are exhaustive cases, which --quick leaves out."""
    return [pytest.param(name, marks=() if name in batches else exhaustive) for name in BATCHES]


def batch_of(subject: PlatformUnderTest, name: str) -> Batch:
    """The batch; skipped if it has earlier tokens and the platform supports neither chunks nor prefix caching."""
    if name in EARLIER and not (subject.capabilities.chunked_prefill or subject.capabilities.prefix_caching):
        skip_not_claimed("chunked_prefill, prefix_caching")
    return BATCHES[name]


def make_span_spec(dtype: str, **fields: Any) -> AttentionSpec:
    return make_spec(dtype=dtype, non_causal_spans=True, **fields)


def assert_exact(
    subject: PlatformUnderTest, runtime: DeviceRuntime, spec: AttentionSpec, batch: Batch, **options: Any
) -> None:
    backend = backend_for(subject, spec)
    requests, spans = [request for request, _ in batch], [spans for _, spans in batch]
    size = backend.kv_layout().block_sizes[0]
    case = make_case(spec, requests, block_size=size, padding=5, padding_requests=2, spans=spans, **options)
    assert_near(run(backend, runtime, case, poison=math.nan), case)


@clause("ATT-17")
@pytest.mark.parametrize("batch", grid(FEW))
def test_tokens_of_a_span_see_all_of_it(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, batch: str
) -> None:
    assert_exact(subject, bound_device, make_span_spec(claimed_dtype), batch_of(subject, batch))


@clause("ATT-17", needs="sliding_window")
@pytest.mark.parametrize("window", [7, *(pytest.param(window, marks=exhaustive) for window in (1, 33, 500))])
@pytest.mark.parametrize("batch", grid(FEW))
def test_a_window_hides_what_is_behind_it_in_spans_too(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, batch: str, window: int
) -> None:
    spec = make_span_spec(claimed_dtype, sliding_window=window)
    assert_exact(subject, bound_device, spec, batch_of(subject, batch))


@clause("ATT-17")
@pytest.mark.parametrize(
    "heads",
    [pytest.param(heads, marks=() if heads == (6, 2) else exhaustive, id=f"{heads[0]}x{heads[1]}") for heads in HEADS],
)
def test_heads_are_shared_in_spans(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str, heads: tuple[int, int]
) -> None:
    spec = make_span_spec(claimed_dtype, num_heads=heads[0], num_kv_heads=heads[1])
    assert_exact(subject, bound_device, spec, batch_of(subject, "prompts and decodes"))


@clause("ATT-17")
def test_every_storage_dtype_has_spans(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    features = claimed(subject, {"sliding_window": 20, "soft_cap": 3.0, "sinks": True})
    for kv_dtype in subject.capabilities.kv_dtypes:
        for fields in ({}, features):
            spec = make_span_spec(claimed_dtype, kv_dtype=kv_dtype, **fields)
            try:
                checked_attention_backend(subject.platform, spec)
            except PlatformError:
                assert kv_dtype != claimed_dtype
                continue
            assert_exact(subject, bound_device, spec, batch_of(subject, "prompts and decodes"))


@clause("ATT-17")
def test_a_step_without_spans_is_causal(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    """Also right after a step of the same backend that had some."""
    spec = make_span_spec(claimed_dtype)
    assert_exact(subject, bound_device, spec, [((0, 30), [(2, 29)])])
    backend = backend_for(subject, spec)
    case = make_case(spec, [(0, 30), (20, 1)], block_size=backend.kv_layout().block_sizes[0])
    assert_near(run(backend, bound_device, case), case)


@clause("ATT-17", needs="batch_invariant")
def test_spans_are_batch_invariant(subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str) -> None:
    spec = make_span_spec(claimed_dtype, batch_invariant=True)
    backend = backend_for(subject, spec)
    size, span, length = backend.kv_layout().block_sizes[0], [(37, 290)], 300
    whole = make_case(spec, [(0, length)], block_size=size, seed=1, spans=[span])
    wanted = run(backend, bound_device, whole)
    assert_near(wanted, whole)
    for first, end in ((0, length), (0, 290), (37, length), (100, 290), (289, 290), (290, 291)):
        requests, spans = [(50, 1), (first, end - first), (0, 40)], [[], span, [(0, 35)]]
        case = make_case(spec, requests, block_size=size, seed=2, spans=spans)
        case.keys[1], case.values[1] = whole.keys[0][:end], whole.values[0][:end]
        case.query[1 : 1 + end - first] = whole.query[first:end]
        found = run(backend, bound_device, case)[1 : 1 + end - first]
        assert_equal(found, wanted[first:end], f"tokens {first} to {end} among others, by token")


@clause("ATT-17", refusal=True)
def test_spans_that_are_not_claimed_are_refused(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    with pytest.raises(PlatformError, match="non_causal_spans"):
        checked_attention_backend(subject.platform, make_span_spec(subject.capabilities.dtypes[0]))
