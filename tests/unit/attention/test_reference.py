"""Reference attention equals a dense float64 computation, for any mix of requests."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from mvllm.attention.reference import ReferenceAttention
from mvllm.platform.attention import AttentionSpec, BatchLayout
from tests.helpers.paged_driver import HOST, make_layout

# Requests of a step as (new tokens, length after the step).
BATCHES = {
    "one decode": [(1, 1)],
    "decodes": [(1, 5), (1, 33), (1, 16), (1, 17)],
    "prefills": [(7, 7), (16, 16), (40, 40)],
    "chunked and mixed": [(1, 9), (13, 40), (5, 5), (1, 64), (30, 35)],
}


def make_spec(**settings: object) -> AttentionSpec:
    values = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "dtype": "float32",
        "kv_dtype": "float32",
        "scale": 0.3,
        **settings,
    }
    return AttentionSpec(**values)  # type: ignore[arg-type]


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One request in float64, one query and one head at a time. The queries are at the last positions."""
    result = torch.zeros(query.shape, dtype=torch.float64)
    group = spec.num_heads // spec.num_kv_heads
    for i, head in itertools.product(range(query.shape[0]), range(spec.num_heads)):
        position = key.shape[0] - query.shape[0] + i
        first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
        keys, values = (t[first : position + 1, head // group].double() for t in (key, value))
        scores = keys @ query[i, head].double() * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        weights = torch.exp(scores)
        total = weights.sum() + (0 if sinks is None else torch.exp(sinks[head].double()))
        result[i, head] = weights @ values / total
    return result.flatten(1)


def run_steps(
    spec: AttentionSpec, batch: list[tuple[int, int]], block_size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs `batch` after one step that wrote its earlier tokens. Returns the output and the dense result."""
    generator = torch.Generator().manual_seed(seed)
    backend = ReferenceAttention(spec)
    assert ReferenceAttention.validate(spec) == []
    lens = [length for _, length in batch]
    free = list(range(sum(-(-length // block_size) for length in lens) + 3))
    random.Random(seed).shuffle(free)
    tables = [[free.pop() for _ in range(-(-length // block_size))] for length in lens]
    kv = backend.allocate(sum(map(len, tables)) + 3, block_size, HOST)

    keys = [torch.randn(n, spec.num_kv_heads, spec.head_size, generator=generator) for n in lens]
    values = [torch.randn(n, spec.num_kv_heads, spec.head_size, generator=generator) for n in lens]
    queries = [torch.randn(n, spec.num_heads, spec.head_size, generator=generator) for n, _ in batch]
    sinks = torch.randn(spec.num_heads, generator=generator) if spec.sinks else None

    for counts, ends in ((None, [n - new for new, n in batch]), ([new for new, _ in batch], lens)):
        kept = [r for r in range(len(batch)) if ends[r] > 0]
        if not kept:
            continue
        counts = counts or ends
        layout = make_layout([counts[r] for r in kept], [ends[r] for r in kept], [tables[r] for r in kept], block_size)
        metadata = backend.build_metadata(layout)
        part = [slice(ends[r] - counts[r], ends[r]) for r in kept]
        new_keys = torch.cat([keys[r][s] for r, s in zip(kept, part, strict=True)])
        new_values = torch.cat([values[r][s] for r, s in zip(kept, part, strict=True)])
        backend.write_kv(kv, new_keys, new_values, metadata)
    output = backend.forward(torch.cat(queries), kv, metadata, sinks)
    expected = [dense(q, k, v, spec, sinks) for q, k, v in zip(queries, keys, values, strict=True)]
    return output, torch.cat(expected)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_equals_dense_attention_for_every_batch_and_block_size(batch: list[tuple[int, int]], block_size: int) -> None:
    output, expected = run_steps(make_spec(), batch, block_size)
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("head_size", [1, 5, 16, 80, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1)])
def test_equals_dense_attention_for_every_head_shape(head_size: int, num_heads: int, num_kv_heads: int) -> None:
    spec = make_spec(head_size=head_size, num_heads=num_heads, num_kv_heads=num_kv_heads, scale=head_size**-0.5)
    output, expected = run_steps(spec, [(1, 9), (13, 20), (3, 3)], 4)
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", [1, 3, 16, 100])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
def test_equals_dense_attention_with_window_soft_cap_and_sinks(
    window: int, soft_cap: float | None, sinks: bool
) -> None:
    spec = make_spec(sliding_window=window, soft_cap=soft_cap, sinks=sinks)
    output, expected = run_steps(spec, BATCHES["chunked and mixed"], 8)
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=0)


def test_prompts_longer_than_a_query_tile_are_computed_completely() -> None:
    spec = make_spec(num_heads=1, num_kv_heads=1, head_size=4, sliding_window=200)
    output, expected = run_steps(spec, [(1, 4), (600, 650)], 16)
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=0)


def test_keys_are_stored_in_the_cache_dtype_and_scores_are_computed_in_float32() -> None:
    spec = make_spec(dtype="bfloat16", kv_dtype="bfloat16")
    backend = ReferenceAttention(spec)
    kv = backend.allocate(2, 16, HOST)
    assert kv.dtype == torch.bfloat16
    metadata = backend.build_metadata(make_layout([20], [20], [[1, 0]], 16))
    query, key, value = (torch.randn(20, heads, 16).bfloat16() for heads in (4, 2, 2))
    backend.write_kv(kv, key, value, metadata)
    output = backend.forward(query, kv, metadata)
    assert output.dtype == torch.bfloat16
    # Only the result is rounded to bfloat16: at most half a unit in the last of its eight bits.
    torch.testing.assert_close(output.double(), dense(query, key, value, spec, None), atol=1e-5, rtol=2**-8)


def test_blocks_outside_of_the_window_are_not_read() -> None:
    spec = make_spec(sliding_window=6)
    backend = ReferenceAttention(spec)
    layout = make_layout([1], [40], [[10**6, 10**6, 10**6, 1, 0]], 8)  # the first three blocks are out of the window
    kv = backend.allocate(2, 8, HOST).fill_(1.0)
    output = backend.forward(torch.randn(1, 4, 16), kv, backend.build_metadata(layout))
    torch.testing.assert_close(output, torch.ones(1, 64))


def padded(layout: BatchLayout, tokens: int) -> BatchLayout:
    """`layout` with padding tokens at its end, as in a step that is padded to a bucket."""
    slots = np.concatenate((layout.slot_mapping, np.full(tokens, -1, np.int32)))
    starts = np.append(layout.query_start_loc, layout.query_start_loc[-1]).astype(np.int32)
    lens = np.append(layout.seq_lens, 0).astype(np.int32)
    table = np.concatenate((layout.block_table, np.zeros_like(layout.block_table[:1])))
    arrays = {"query_start_loc": starts, "seq_lens": lens, "block_table": table, "slot_mapping": slots}
    return BatchLayout(
        num_requests=layout.num_requests + 1,
        num_tokens=layout.num_tokens + tokens,
        max_query_len=layout.max_query_len,
        max_seq_len=layout.max_seq_len,
        block_size=layout.block_size,
        **arrays,
        **{f"{name}_device": torch.from_numpy(array) for name, array in arrays.items()},
    )


def test_padding_writes_nothing_and_gives_finite_rows() -> None:
    backend = ReferenceAttention(make_spec())
    plain = make_layout([3], [3], [[1]], 4)
    query, key, value = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    results = []
    for layout, n in ((plain, 3), (padded(plain, 2), 5)):
        kv = backend.allocate(2, 4, HOST)
        metadata = backend.build_metadata(layout)
        backend.write_kv(kv, key[:n], value[:n], metadata)
        results.append((kv, backend.forward(query[:n], kv, metadata)))
    (kv, output), (padded_kv, padded_output) = results
    torch.testing.assert_close(padded_kv, kv)
    torch.testing.assert_close(padded_output[:3], output)
    assert padded_output.isfinite().all()


def test_strided_queries_keys_and_values_are_accepted() -> None:
    backend = ReferenceAttention(make_spec())
    qkv = torch.randn(6, (4 + 2 + 2) * 16)
    query, key, value = (t.view(6, -1, 16) for t in qkv.split((64, 32, 32), dim=-1))
    metadata = backend.build_metadata(make_layout([6], [6], [[0]], 8))
    outputs = []
    for tensors in ((query, key, value), tuple(t.contiguous() for t in (query, key, value))):
        kv = backend.allocate(1, 8, HOST)
        backend.write_kv(kv, *tensors[1:], metadata)
        outputs.append(backend.forward(tensors[0], kv, metadata))
    torch.testing.assert_close(*outputs, atol=0, rtol=0)


def test_copy_blocks_copies_keys_and_values_of_whole_blocks() -> None:
    backend = ReferenceAttention(make_spec())
    kv = backend.allocate(5, 4, HOST)
    kv.copy_(torch.randn(kv.shape))
    before = kv.clone()
    backend.copy_blocks(kv, torch.tensor([0, 3]), torch.tensor([4, 1]))
    torch.testing.assert_close(kv[:, [4, 1]], before[:, [0, 3]])
    torch.testing.assert_close(kv[:, [0, 2, 3]], before[:, [0, 2, 3]])


def test_bytes_per_token_equals_the_cache_size() -> None:
    backend = ReferenceAttention(make_spec(kv_dtype="bfloat16"))
    kv = backend.allocate(3, 16, HOST)
    assert backend.kv_layout().bytes_per_token * 3 * 16 == kv.numel() * kv.element_size()


def test_specs_that_cannot_run_are_refused_with_the_reason() -> None:
    (reason,) = ReferenceAttention.validate(make_spec(num_heads=5))
    assert "5 query heads" in reason
    (reason,) = ReferenceAttention.validate(make_spec(kv_dtype="int3"))
    assert "int3" in reason
