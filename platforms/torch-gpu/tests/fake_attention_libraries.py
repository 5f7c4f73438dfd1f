"""Replacements of flash_attn, flashinfer and torch's varlen_attn, with their documented signatures and rules.

They compute dense attention.

Each call is checked against the packages' documentation and recorded in `calls`.
"""

from __future__ import annotations

import importlib
import itertools
import types
from typing import Any

import torch

as_recorded = importlib.import_module("platforms.torch-gpu.tests.flashinfer_signatures").as_recorded

FLASH_ATTN, FLASHINFER, VARLEN = "flash_attn", "flashinfer", "torch.nn.attention.varlen"


def _attention(q, k, v, scale, window_left, soft_cap):
    """Attention of one request: q [n, heads, size], k and v [m, kv_heads, size]. The last n keys are of q's tokens."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at, key_at = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))[None]
    seen = key_at <= at
    if window_left >= 0:
        seen &= key_at >= at - window_left
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def _pages(cache, blocks, length):
    size = cache.shape[1]
    return cache[blocks[: -(-length // size)].long()].flatten(0, 1)[:length]


def _check_flash(q, k, v, block_table, *int32):
    assert k.shape[1] % 256 == 0, "page_block_size must be a multiple of 256"
    assert q.dtype in (torch.float16, torch.bfloat16) and k.dtype == v.dtype == q.dtype
    assert all(x.dtype == torch.int32 for x in (block_table, *int32)) and q.stride(-1) == 1


def make_flash_attn(calls: list[str], *, soft_cap: bool = True) -> types.ModuleType:
    """The package; without `soft_cap` an old version, whose functions lack that parameter."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        calls.append("varlen")
        _check_flash(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
        starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert causal and window_size[1] == (-1 if window_size[0] == -1 else 0)
        out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)  # rows without a query are undefined
        for r, (a, b) in enumerate(itertools.pairwise(starts)):
            length = key_starts[r + 1] - key_starts[r]
            assert b - a <= max_seqlen_q and length <= max_seqlen_k
            if b > a:
                keys, values = (_pages(cache, block_table[r], length) for cache in (k, v))
                out[a:b] = _attention(q[a:b], keys, values, softmax_scale, window_size[0], softcap)
        return out

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        calls.append("kvcache")
        assert causal and q.dim() == 4 and len(cache_seqlens) == len(block_table) == len(q)
        _check_flash(q, k_cache, v_cache, block_table, cache_seqlens)
        out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
        for r, length in enumerate(cache_seqlens.tolist()):
            if length:
                keys, values = (_pages(cache, block_table[r], length) for cache in (k_cache, v_cache))
                out[r] = _attention(q[r], keys, values, softmax_scale, window_size[0], softcap)
        return out

    module = types.ModuleType(FLASH_ATTN)
    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache
    if not soft_cap:
        module.flash_attn_with_kvcache = lambda q, k_cache, v_cache, block_table=None, window_size=(-1, -1): None
    return module


def make_varlen(calls: list[str]) -> types.ModuleType:
    """Torch's module of `varlen_attn`, dispatching to FlashAttention 3."""

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
        enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        calls.append("varlen_attn")
        assert cu_seq_k is None, "not with a block table"
        assert window_size[1] == 0 and enable_gqa == (query.shape[1] != key.shape[2])
        assert query.stride(-1) == 1 and key.dtype == value.dtype == query.dtype
        assert all(x.dtype == torch.int32 for x in (cu_seq_q, seqused_k, block_table))
        out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
        for r, (a, b) in enumerate(itertools.pairwise(cu_seq_q.tolist())):
            length = int(seqused_k[r])
            assert b - a <= max_q and length <= max_k
            if b > a:
                keys, values = (_pages(cache, block_table[r], length) for cache in (key, value))
                out[a:b] = _attention(query[a:b], keys, values, scale, window_size[0], 0.0)
        return out

    module = types.ModuleType(VARLEN)
    module.varlen_attn = varlen_attn
    return module


def make_flashinfer(calls: list[str]) -> types.ModuleType:
    """The package, with its wrappers for prompts and for decode steps. Their signatures are the recorded ones."""
    prefill = as_recorded("BatchPrefillWithPagedKVCacheWrapper")
    decode = as_recorded("BatchDecodeWithPagedKVCacheWrapper")

    class BatchPrefillWithPagedKVCacheWrapper:
        @prefill
        def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, **buffers):
            assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
            self.planned: dict[str, Any] = {}

        @prefill
        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
            pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
            rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
            non_blocking=True,
        ):  # fmt: skip
            calls.append("plan")
            assert causal and head_dim_qk in (64, 128, 256)
            assert paged_kv_indptr[-1] == len(paged_kv_indices)
            assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
            tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            assert all(table.dtype == torch.int32 for table in tables)
            self.planned = {**locals(), "tables": [table.clone() for table in tables]}

        @prefill
        def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None):
            calls.append("run")
            p, (keys, values) = self.planned, paged_kv_cache
            starts, indptr, indices, last = (table.tolist() for table in p["tables"])
            assert q.shape == (starts[-1], p["num_qo_heads"], p["head_dim_qk"]) and q.dtype == p["q_data_type"]
            for r, (a, b) in enumerate(itertools.pairwise(starts)):
                blocks = torch.tensor(indices[indptr[r] : indptr[r + 1]])
                length = (len(blocks) - 1) * p["page_size"] + last[r]
                k, v = (_pages(cache, blocks, length) for cache in (keys, values))
                out[a:b] = _attention(q[a:b], k, v, p["sm_scale"], p["window_left"], p["logits_soft_cap"])
            return out

    class BatchDecodeWithPagedKVCacheWrapper:
        """With `use_cuda_graph`. `run` reads the tables in its buffers alone, by operations that can be captured."""

        @decode
        def __init__(
            self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
            paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
            backend="auto", jit_args=None,
        ):  # fmt: skip
            assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD" and use_cuda_graph
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

        @decode
        def plan(
            self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
            o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True,
            block_tables=None, seq_lens=None,
        ):  # fmt: skip
            calls.append("plan decode")
            assert head_dim in (64, 128, 256) and len(indices) <= len(self.buffers[1])
            assert indptr[-1] == len(indices) and (indptr[1:] > indptr[:-1]).all()
            assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
            for buffer, table in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
                assert table.dtype == torch.int32
                buffer[: len(table)].copy_(table)
            self.planned = (sm_scale, window_left, logits_soft_cap)

        @decode
        def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None):
            calls.append("run decode")
            (indptr, indices, last), (keys, values) = self.buffers, paged_kv_cache
            (scale, window_left, soft_cap), size = self.planned, keys.shape[1]
            lens = (indptr[1:] - indptr[:-1] - 1) * size + last
            page = indptr[:-1, None] + torch.arange(len(indices) // len(last))
            blocks = indices[page.clamp(max=len(indices) - 1)].clamp(0, len(keys) - 1).long()
            at, group = torch.arange(page.shape[1] * size), q.shape[1] // keys.shape[2]
            k, v = (x[blocks].flatten(1, 2).double().repeat_interleave(group, dim=2) for x in (keys, values))
            scores = torch.einsum("rhd,rkhd->rhk", q.double(), k) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            seen = at < lens[:, None]
            if window_left >= 0:
                seen = seen & (at >= lens[:, None] - 1 - window_left)
            weights = torch.where(seen[:, None], scores, -torch.inf).softmax(dim=-1)
            out.copy_(torch.einsum("rhk,rkhd->rhd", weights, torch.where(seen[..., None, None], v, 0.0)))
            return out

    module = types.ModuleType(FLASHINFER)
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return module
