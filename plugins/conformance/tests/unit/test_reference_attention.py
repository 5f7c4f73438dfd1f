"""Core's reference attention equals the suite's dense attention: 8-bit caches, MLA, non-causal spans, tiles."""

from __future__ import annotations

import pytest
import torch

from mvllm.attention.reference import ReferenceAttention
from mvllm_conformance.attention_cases import expected, make_case, make_spec, run, store
from tests.unit.worker.builders import HostRuntime

REQUESTS = [(0, 20), (33, 1), (16, 9), (0, 1)]
SHAPES = {
    "alike": ((4, 2), 16, {}),
    "values smaller": ((4, 2), 24, {"value_head_size": 16}),
    "values larger": ((2, 1), 16, {"value_head_size": 40}),
    "values in keys": ((8, 1), 72, {"value_head_size": 64, "values_in_keys": True}),
    "values are the keys": ((4, 2), 16, {"values_in_keys": True}),
}
SPARSE = {"value_head_size": 16, "values_in_keys": True, "index_topk": 4}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("features", [{}, {"sliding_window": 7, "soft_cap": 2.0, "sinks": True}], ids=["plain", "all"])
def test_equals_dense_attention_over_the_stored_values(shape, kv_dtype, features) -> None:
    heads, size, fields = shape
    spec = make_spec(*heads, size, kv_dtype=kv_dtype, **fields, **features)
    assert ReferenceAttention.validate(spec) == []
    case = make_case(spec, REQUESTS, block_size=8)
    for moved in (False, True):
        found = run(ReferenceAttention(spec), HostRuntime(), case, poison=torch.nan, move_blocks=moved)
        torch.testing.assert_close(found.double(), expected(case), atol=5e-6, rtol=0)


@pytest.mark.parametrize("features", [{}, {"sliding_window": 7, "soft_cap": 2.0, "sinks": True}], ids=["plain", "all"])
def test_the_reference_attends_to_what_each_token_sees(features: dict) -> None:
    spec = make_spec(4, 2, 16, non_causal_spans=True, **features)
    requests = [(20, 1), (0, 300), (11, 30), (0, 4)]
    spans = [[(3, 9)], [(5, 280)], [(2, 6), (8, 25), (25, 40)], []]
    case = make_case(spec, requests, block_size=8, padding=3, spans=spans)
    found = run(ReferenceAttention(spec), HostRuntime(), case, poison=torch.nan)
    torch.testing.assert_close(found[: case.num_real_tokens].double(), expected(case), atol=5e-6, rtol=0)


def test_large_prompts_are_cut_into_tiles_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(4, 1, 16, **SPARSE, indexer=True)
    backend = ReferenceAttention(spec)
    case = make_case(spec, [(30, 1), (0, 50), (5, 17)], block_size=8)
    weights = torch.randn(68, 4, generator=torch.Generator().manual_seed(0))
    harness, metadata, query = store(backend, HostRuntime(), case, poison=torch.nan)
    whole = backend.select(query, weights, harness.kv, metadata)
    attention = ReferenceAttention(make_spec(4, 1, 16, **SPARSE))
    attended = attention.forward_selected(query, harness.kv, metadata, whole)
    monkeypatch.setattr("mvllm.attention.selection._TILE_ELEMENTS", 800)
    monkeypatch.setattr("mvllm.attention.reference._SELECTED_ELEMENTS", 200)
    assert torch.equal(backend.select(query, weights, harness.kv, metadata), whole)
    torch.testing.assert_close(attention.forward_selected(query, harness.kv, metadata, whole), attended)
