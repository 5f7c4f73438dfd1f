"""Norm, rotary embedding and KV write in one launch equal the separate kernels, in every cache format."""

from __future__ import annotations

import importlib

import pytest
import torch

importlib.import_module("platforms.triton-kernels.tests.interpreted")

from mvllm_triton import norm, rotary_embedding  # noqa: E402  once Triton is imported with its interpreter
from mvllm_triton.reshape_and_cache import reshape_and_cache  # noqa: E402
from mvllm_triton.rotary_embedding_and_cache import rotary_embedding_and_cache  # noqa: E402

TOKENS, HEADS, KV_HEADS, BLOCK_SIZE = 4, 4, 2, 8
SLOTS = torch.tensor([9, 0, -1, 23], dtype=torch.int32)
CACHES = {"float": None, "int8": torch.int8, "float8": torch.float8_e4m3fn, "codes": torch.uint8}


def heads(dtype, size):
    """Queries, keys and values as views of one projection."""
    width = (HEADS + 2 * KV_HEADS) * size
    fused = torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(size)).to(dtype)
    parts = fused.split((HEADS * size, KV_HEADS * size, KV_HEADS * size), dim=1)
    return [part.view(TOKENS, -1, size) for part in parts]


def cache(dtype, stored, size):
    shape = (3, BLOCK_SIZE, KV_HEADS)
    caches = [torch.zeros((*shape, size), dtype=stored or dtype) for _ in range(2)]
    return caches, [None if stored is None else torch.zeros(shape) for _ in range(2)]


def angles(rotary_dim):
    found = torch.rand(30, rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    return torch.cat((found.cos(), found.sin()), dim=1)


def separately(query, key, value, index, table, stored, *, order, weights, eps):
    (keys, values), scales = cache(query.dtype, stored, key.shape[2])
    if weights is not None:
        query, key = norm.rms_norm(query, weights[0], eps), norm.rms_norm(key, weights[1], eps)
    if order is not None:
        query, key = query[..., order], key[..., order]
    query, key = rotary_embedding.rotary_embedding(index, query.clone(), key.clone(), table)
    reshape_and_cache(key, value, keys, values, SLOTS, k_scale=scales[0], v_scale=scales[1])
    return query, keys, values, *(scale for scale in scales if scale is not None)


@pytest.mark.parametrize("stored", CACHES)
@pytest.mark.parametrize(
    ("dtype", "size", "rotary_dim", "interleaved", "with_norm"),
    [
        (torch.bfloat16, 64, 64, False, True),
        (torch.float32, 80, 32, False, False),
        (torch.bfloat16, 40, 16, True, True),
        (torch.float16, 32, 32, True, False),
    ],
)
def test_one_launch_equals_norm_rotation_and_write(stored, dtype, size, rotary_dim, interleaved, with_norm):
    query, key, value = heads(dtype, size)
    index, table = torch.tensor([5, 0, 29, 7]), angles(rotary_dim)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(size, generator=generator).to(dtype) for _ in range(2)] if with_norm else None
    order = None
    if interleaved:
        order = torch.arange(size)
        order[:rotary_dim] = order[:rotary_dim].view(-1, 2).T.flatten()
    expected = separately(query, key, value, index, table, CACHES[stored], order=order, weights=weights, eps=1e-5)
    (keys, values), scales = cache(dtype, CACHES[stored], size)
    before = key.clone(), value.clone()
    q_weight, k_weight = weights or (None, None)
    found = rotary_embedding_and_cache(
        query, key, value, index, table, keys, values, SLOTS, interleaved=interleaved, q_weight=q_weight,
        k_weight=k_weight, eps=1e-5, k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    assert (found.data_ptr() == query.data_ptr()) is not interleaved
    assert torch.equal(key, before[0]) and torch.equal(value, before[1])
    results = found, keys, values, *(scale for scale in scales if scale is not None)
    for got, wanted in zip(results, expected, strict=True):
        # Only the order in which a norm adds up may differ: by a rounding, or by an 8-bit step.
        close = 2 ** (-6 if dtype != torch.float32 else -18)
        off = (got.float() - wanted.float()).abs().max()
        assert off <= (1 if got.dtype in (torch.int8, torch.uint8) else close * wanted.float().abs().max())
        assert (got.float() != wanted.float()).float().mean() < (0.02 if with_norm else 1e-9)
    assert keys.float().abs().sum() > 0 and values.float().abs().sum() > 0


def test_padding_stores_nothing_and_no_tokens_are_no_launch():
    query, key, value = heads(torch.float32, 32)
    (keys, values), _ = cache(torch.float32, None, 32)
    nothing = torch.full((TOKENS,), -1, dtype=torch.int32)
    before = query.clone()
    found = rotary_embedding_and_cache(query, key, value, torch.arange(TOKENS) + 1, angles(32), keys, values, nothing)
    assert not torch.equal(found, before) and keys.abs().sum() == values.abs().sum() == 0
    none = rotary_embedding_and_cache(query[:0], key[:0], value[:0], SLOTS[:0], angles(32), keys, values, nothing[:0])
    assert none.shape == (0, HEADS, 32)


def test_scales_and_norms_that_do_not_fit_are_errors():
    query, key, value = heads(torch.float32, 32)
    (keys, values), _ = cache(torch.float32, torch.int8, 32)
    given = query, key, value, torch.arange(TOKENS), angles(32)
    with pytest.raises(ValueError, match="only 8-bit caches have scales"):
        rotary_embedding_and_cache(*given, keys, values, SLOTS)
    with pytest.raises(ValueError, match="both norms"):
        rotary_embedding_and_cache(*given, keys.float(), values.float(), SLOTS, q_weight=torch.ones(32))
