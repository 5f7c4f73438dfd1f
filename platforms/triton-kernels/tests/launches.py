"""Launches of current models, compiled for absent devices.

Nothing is computed: all tensors are on torch's `meta` device, so a launch that depends on the content of a tensor
fails.

Run as a program, with targets and optionally names, it prints the resources of each kernel on each target:
`python -m platforms.triton-kernels.tests.launches sm_90,gfx942 decode-128`. A name is followed by targets of its own
after `@`, in place of the first argument's: `latent-decode@sm_100`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from mvllm_triton import attention
from mvllm_triton.activation import silu_and_mul
from mvllm_triton.argmax import argmax
from mvllm_triton.attention import mla_attention, paged_attention
from mvllm_triton.float8_linear import float8_linear
from mvllm_triton.lora import add_lora_by_slot
from mvllm_triton.moe import clamped_moe, moe
from mvllm_triton.norm import fused_add_rms_norm, rms_norm
from mvllm_triton.packed_experts import FLOAT8, INT4, INT8, MXFP4, PackedExperts
from mvllm_triton.quantized_linear import PackedIntegers, quantized_linear
from mvllm_triton.quantized_moe import quantized_moe
from mvllm_triton.reshape_and_cache import reshape_and_cache, reshape_and_cache_mla
from mvllm_triton.rotary_embedding import rotary_embedding
from mvllm_triton.rotary_embedding_and_cache import rotary_embedding_and_cache
from mvllm_triton.routing import select_experts
from mvllm_triton.sampling import sample
from mvllm_triton.skinny_gemm import skinny_gemm, skinny_gemm_silu_and_mul
from mvllm_triton.state import causal_conv1d, gated_delta_rule, gated_rms_norm, kda, ssd
from mvllm_triton.tiles import skinny_gemm_silu_and_mul_tiles, skinny_gemm_tiles

BF16, F32 = torch.bfloat16, torch.float32
CODES, NATIVE = torch.uint8, torch.float8_e4m3fn


def _integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _attention(
    tokens: int,
    requests: int,
    heads: int,
    kv_heads: int,
    size: int,
    *,
    dtype: torch.dtype = BF16,
    stored: torch.dtype | None = None,
    splits: int = 1,
    **options: Any,
) -> None:
    slots = (2, 16, kv_heads)
    cache = torch.empty((*slots, size), dtype=stored or dtype)
    scales = torch.ones(slots) if stored in (CODES, NATIVE) else None
    paged_attention(
        torch.empty(tokens, heads, size, dtype=dtype), cache, cache, _integers(requests, 64), _integers(requests + 1),
        _integers(requests), scale=1.0, max_query_len=tokens // requests, max_seq_len=8192, k_scale=scales,
        v_scale=scales, splits=splits, **options,
    )  # fmt: skip


def _latent(tokens: int, requests: int, heads: int, *, splits: int = 1, stored: torch.dtype = BF16) -> None:
    mla_attention(
        torch.empty(tokens, heads, 576, dtype=BF16), torch.empty(2, 64, 1, 576, dtype=stored), _integers(requests, 64),
        _integers(requests + 1), _integers(requests), value_size=512, scale=1.0, max_query_len=tokens // requests,
        max_seq_len=8192, kv_scale=torch.ones(2, 64, 1) if stored == CODES else None, splits=splits,
    )  # fmt: skip


def _reshape_and_cache(stored: torch.dtype, scaled: bool) -> None:
    new, cache = torch.empty(16, 8, 128, dtype=BF16), torch.empty(2, 16, 8, 128, dtype=stored)
    scales = torch.ones(2, 16, 8) if scaled else None
    reshape_and_cache(new, new, cache, cache, _integers(16), k_scale=scales, v_scale=scales)


def _rotary_and_cache(stored: torch.dtype, **options: Any) -> None:
    fused, cache = torch.empty(16, 48, 128, dtype=BF16), torch.empty(2, 16, 8, 128, dtype=stored)
    query, key, value = fused.split((32, 8, 8), dim=1)
    scales = torch.ones(2, 16, 8) if stored in (CODES, torch.int8) else None
    angles, weight = torch.empty(64, options.pop("rotary_dim", 128)), torch.empty(128, dtype=BF16)
    norms = {"q_weight": weight, "k_weight": weight, "eps": 1e-6} if options.pop("norm", False) else {}
    rotary_embedding_and_cache(
        query, key, value, _integers(16), angles, cache, cache, _integers(16), k_scale=scales, v_scale=scales,
        **norms, **options,
    )  # fmt: skip


def _rows(dtype: torch.dtype) -> None:
    x, weight = torch.empty(16, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
    rms_norm(x, weight, 1e-6)
    rms_norm(x.view(16, 32, 128), weight[:128], 1e-6)
    fused_add_rms_norm(x, x.clone(), weight, 1e-6)
    silu_and_mul(x)
    argmax(torch.empty(16, 128256, dtype=dtype))
    rotary_embedding(_integers(16), x.view(16, 32, 128), x.view(16, 32, 128)[:, :8], torch.empty(64, 128))


def _states(tokens: int, requests: int) -> None:
    """The sizes of a Qwen3-Next, Kimi Linear and Granite 4 model."""
    slots = _integers(requests + 1), _integers(requests), _integers(requests), tokens // requests
    x, weight = torch.empty(tokens, 8192, dtype=BF16), torch.empty(8192, 4, dtype=BF16)
    causal_conv1d(x, weight, None, torch.empty(3, 8192, 3, dtype=BF16), *slots, "silu")
    heads, b = torch.empty(tokens, 128, 64, dtype=BF16), torch.empty(tokens, 1, 128, dtype=BF16)
    rates = torch.empty(128)
    ssd(
        heads, heads[..., 0].contiguous(), rates, b, b, rates, rates, torch.empty(3, 128, 64, 128), *slots, 0.0, 1e9
    )  # fmt: skip
    q, v = torch.empty(tokens, 16, 128, dtype=BF16), torch.empty(tokens, 32, 128, dtype=BF16)
    beta, state = torch.empty(tokens, 32, dtype=BF16), torch.empty(3, 32, 128, 128)
    gated_delta_rule(q, q, v, torch.empty(tokens, 32), beta, state, *slots, 0.1, True)
    kda(v, v, v, torch.empty(tokens, 32, 128), beta, state, *slots, 0.1, True)
    gated_rms_norm(v, v, torch.empty(128, dtype=BF16), 1e-6, 128, True, "silu")
    gated_rms_norm(x, x, torch.empty(8192), 1e-6, 8192, False, "silu")


def _experts(tokens: int, dtype: torch.dtype = BF16) -> None:
    x, ids, shares = (
        torch.empty(tokens, 2048, dtype=dtype),
        torch.zeros(tokens, 8, dtype=torch.int64),
        torch.ones(tokens, 8),
    )
    moe(x, torch.empty(64, 1536, 2048, dtype=dtype), torch.empty(64, 2048, 768, dtype=dtype), ids, shares)


def _selection(experts: int, top_k: int, scores: str, groups: tuple[int, int]) -> None:
    logits, correction = torch.empty(64, experts), torch.empty(experts) if scores == "sigmoid" else None
    select_experts(logits, correction, top_k, scores, True, 2.5, *groups, "best_two")


def _clamped_experts(tokens: int) -> None:
    clamped_moe(
        torch.empty(tokens, 2880, dtype=BF16), torch.empty(8, 5760, 2880, dtype=BF16), torch.empty(8, 5760, dtype=BF16),
        torch.empty(8, 2880, 2880, dtype=BF16), torch.empty(8, 2880, dtype=BF16),
        torch.zeros(tokens, 4, dtype=torch.int64), torch.ones(tokens, 4), 1.702, 7.0,
    )  # fmt: skip


def _skinny_gemm(tokens: int, sizes: tuple[int, int] = (4096, 4096), *, memory: int = 160 << 10) -> None:
    weight = torch.empty(sizes, dtype=BF16)
    bias = None if sizes == (4096, 4096) else weight[:, 0]
    tiles = skinny_gemm_tiles(tokens, *sizes, 132, memory)
    skinny_gemm(torch.empty(tokens, sizes[1], dtype=BF16), weight, bias, tiles=tiles)


def _packed_experts(tokens: int, kind: int, *, rounded: bool = False, native: bool = True, dtype: Any = BF16) -> None:
    """Experts of the sizes of GPT-OSS for MXFP4, else of Qwen3-30B-A3B."""
    hidden, inner, experts, top_k = (2880, 2880, 128, 4) if kind == MXFP4 else (2048, 768, 128, 8)

    def weight(rows: int, columns: int) -> PackedExperts:
        if kind == MXFP4:
            data = torch.empty(experts, rows, columns // 2, dtype=torch.uint8)
            scales = torch.empty(experts, -(-columns // 128), rows, dtype=torch.int32)
            return PackedExperts(kind, data, scales, None, 32, 1, 128, columns, rows)
        stored = {INT4: torch.uint8, INT8: torch.int8, FLOAT8: NATIVE}[kind]
        data = torch.empty(experts, rows, columns // 2 if kind == INT4 else columns, dtype=stored)
        scales = torch.empty(experts, columns // 128, rows // 128 if kind == FLOAT8 else rows)
        zeros = torch.empty(scales.shape, dtype=torch.int8) if kind == INT4 else None
        sizes = 128, 128 if kind == FLOAT8 else 1, 128, columns, rows
        return PackedExperts(kind, data, scales, zeros, *sizes, rounded=rounded, native=native)

    clamped = kind == MXFP4
    biases = [torch.empty(experts, size, dtype=dtype) if clamped else None for size in (2 * inner, hidden)]
    quantized_moe(
        torch.empty(tokens, hidden, dtype=dtype), weight(2 * inner, hidden), biases[0], weight(hidden, inner),
        biases[1], torch.zeros(tokens, top_k, dtype=torch.int64), torch.ones(tokens, top_k),
        *((1.702, 7.0) if clamped else (None, None)),
    )  # fmt: skip


def _skinny_gemm_silu_and_mul(tokens: int, memory: int = 64 << 10) -> None:
    tiles = skinny_gemm_silu_and_mul_tiles(tokens, 4096, memory)
    skinny_gemm_silu_and_mul(
        torch.empty(tokens, 4096, dtype=BF16), torch.empty(28672, 4096, dtype=BF16), None, tiles=tiles
    )


def _integer_product(tokens: int, bits: int, int8_activations: bool, group_size: int = 128) -> None:
    data = torch.empty(4096, 4096 * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
    scales = torch.empty(4096, 4096 // group_size)
    zeros = scales.to(torch.int8)
    weight = PackedIntegers(data, scales, zeros, group_size, bits, int8_activations, 4096, 4096, group_size)
    quantized_linear(torch.empty(tokens, 4096, dtype=BF16), weight, None)


def _float8_product(
    tokens: int, block: tuple[int, int] | None, *, stored: torch.dtype = NATIVE, **options: bool
) -> None:
    weight = torch.empty(4096, 4096, dtype=stored)
    scale = torch.empty((32, 32) if block else (4096, 1))
    float8_linear(torch.empty(tokens, 4096, dtype=BF16), weight, scale, block=block, **options)


def _adapters(tokens: int, rank: int, dtype: torch.dtype = BF16) -> None:
    bands = ((0, 4096, 0), (4096, 5120, 1), (5120, 6144, 2))
    down, up = torch.empty(8, 3, rank, 4096, dtype=dtype), torch.empty(8, 6144, rank, dtype=dtype)
    y, x = torch.empty(tokens, 6144, dtype=dtype), torch.empty(tokens, 4096, dtype=dtype)
    add_lora_by_slot(y, x, down, up, _integers(tokens), bands)


def _sample(rows: int) -> None:
    each = torch.ones(rows)
    sample(torch.empty(rows, 151936), each, each, _integers(rows), each, each, each)


LAUNCHES: dict[str, Callable[[], None]] = {
    "decode-128": lambda: _attention(64, 64, 32, 8, 128, splits=4),
    "decode-64": lambda: _attention(64, 64, 64, 8, 64, sinks=torch.empty(64), window=128),
    "decode-float8": lambda: _attention(64, 64, 32, 8, 128, stored=NATIVE, splits=4),
    "decode-codes": lambda: _attention(64, 64, 32, 8, 128, stored=CODES, splits=4),
    "prefill-64": lambda: _attention(2048, 1, 32, 8, 64),
    "prefill-80": lambda: _attention(2048, 1, 32, 32, 80),
    "prefill-128": lambda: _attention(2048, 1, 32, 8, 128),
    "prefill-spans": lambda: _attention(2048, 1, 32, 8, 128, window=1024, visible_lens=_integers(2048)),
    "prefill-256": lambda: _attention(2048, 1, 16, 8, 256, soft_cap=50.0, window=4096),
    "prefill-float32": lambda: _attention(512, 1, 32, 8, 128, dtype=F32),
    "prefill-codes": lambda: _attention(2048, 1, 32, 8, 128, stored=CODES),
    "decode-512": lambda: _attention(64, 64, 16, 8, 512),
    "prefill-512": lambda: _attention(2048, 1, 16, 8, 512),
    "mixed-128": lambda: _attention(2048, 64, 32, 8, 128, splits=4),
    "latent-decode": lambda: _latent(64, 64, 128, splits=2),
    "latent-decode-codes": lambda: _latent(64, 64, 16, splits=2, stored=CODES),
    "latent-prefill": lambda: _latent(512, 1, 128),
    "reshape-and-cache": lambda: _reshape_and_cache(BF16, False),
    "reshape-and-cache-codes": lambda: _reshape_and_cache(CODES, True),
    "reshape-and-cache-mla": lambda: reshape_and_cache_mla(
        torch.empty(16, 1, 576, dtype=BF16), torch.empty(2, 64, 1, 576, dtype=BF16), _integers(16)
    ),
    "rotary-and-cache": lambda: _rotary_and_cache(BF16, norm=True),
    "rotary-and-cache-codes": lambda: _rotary_and_cache(CODES, rotary_dim=64),
    "rotary-and-cache-interleaved": lambda: _rotary_and_cache(torch.int8, interleaved=True, norm=True),
    "rows": lambda: _rows(BF16),
    "states-decode": lambda: _states(16, 16),
    "states-prompts": lambda: _states(1024, 2),
    "rows-float32": lambda: _rows(F32),
    "sample": lambda: _sample(16),
    "adapters-decode": lambda: _adapters(64, 16),
    "adapters-prefill": lambda: _adapters(2048, 64),
    "adapters-float32": lambda: _adapters(512, 8, F32),
    "experts-decode": lambda: _experts(8),
    "experts-prefill": lambda: _experts(2048),
    "experts-float32": lambda: _experts(64, F32),
    "selection-groups": lambda: _selection(256, 8, "sigmoid", (8, 4)),
    "selection-512": lambda: _selection(512, 10, "softmax", (1, 1)),
    "selection-of-chosen": lambda: _selection(128, 4, "softmax_of_chosen", (1, 1)),
    "clamped-experts": lambda: _clamped_experts(16),
    "skinny-gemm-1": lambda: _skinny_gemm(1),
    "skinny-gemm-8": lambda: _skinny_gemm(8),
    "skinny-gemm-16": lambda: _skinny_gemm(16),
    "skinny-gemm-64": lambda: _skinny_gemm(64),
    "skinny-gemm-uneven": lambda: _skinny_gemm(16, (4104, 4112)),
    "skinny-gemm-gated-1": lambda: _skinny_gemm_silu_and_mul(1),
    "skinny-gemm-gated-16": lambda: _skinny_gemm_silu_and_mul(16, 160 << 10),
    "skinny-gemm-gated-16-small": lambda: _skinny_gemm_silu_and_mul(16),
    "skinny-gemm-8-small": lambda: _skinny_gemm(8, memory=64 << 10),
    "skinny-gemm-64-small": lambda: _skinny_gemm(64, memory=64 << 10),
    "int8-decode": lambda: _integer_product(8, 8, False),
    "int4-decode": lambda: _integer_product(8, 4, False),
    "int4-prefill": lambda: _integer_product(2048, 4, False),
    "int8-activations": lambda: _integer_product(2048, 8, True),
    "int4-int8-activations": lambda: _integer_product(64, 4, True),
    "int4-int8-small-groups": lambda: _integer_product(64, 4, True, 32),
    "float8-decode": lambda: _float8_product(8, None),
    "float8-prefill": lambda: _float8_product(2048, None),
    "float8-blocks": lambda: _float8_product(2048, (128, 128)),
    "float8-other-codes": lambda: _float8_product(2048, None, stored=torch.float8_e4m3fnuz),
    "float8-weights-decode": lambda: _float8_product(8, (128, 128), rounded=False),
    "float8-weights-prefill": lambda: _float8_product(2048, None, rounded=False),
    "float8-codes-prefill": lambda: _float8_product(2048, None, native=False),
    "float8-codes": lambda: _float8_product(64, (128, 128), native=False),
    "int4-one": lambda: _integer_product(1, 4, False),
    "mxfp4-experts-decode": lambda: _packed_experts(1, MXFP4),
    "mxfp4-experts-batch": lambda: _packed_experts(64, MXFP4),
    "mxfp4-experts-prefill": lambda: _packed_experts(8192, MXFP4),
    "mxfp4-experts-float32": lambda: _packed_experts(8, MXFP4, dtype=F32),
    "float8-experts-decode": lambda: _packed_experts(1, FLOAT8, rounded=True),
    "float8-experts-prefill": lambda: _packed_experts(8192, FLOAT8, rounded=True),
    "float8-codes-experts-decode": lambda: _packed_experts(1, FLOAT8, rounded=True, native=False),
    "float8-codes-experts-prefill": lambda: _packed_experts(8192, FLOAT8, rounded=True, native=False),
    "float8-weights-experts-decode": lambda: _packed_experts(1, FLOAT8, native=False),
    "int4-experts-decode": lambda: _packed_experts(1, INT4),
    "int4-experts-prefill": lambda: _packed_experts(8192, INT4),
    "int8-experts-decode": lambda: _packed_experts(1, INT8, rounded=True),
    "int8-experts-prefill": lambda: _packed_experts(8192, INT8, rounded=True),
}

_OCP = frozenset({"sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx950", "gfx1201"})
_LARGE = frozenset({"sm_80", "sm_90", "sm_100", "sm_103", "gfx950"})
TAKEN_BY = {
    "skinny-gemm-8": _LARGE,
    "skinny-gemm-16": _LARGE,
    "skinny-gemm-64": _LARGE,
    "skinny-gemm-uneven": _LARGE,
    "skinny-gemm-gated-16": _LARGE,
    "decode-float8": _OCP,
    "float8-decode": _OCP,
    "float8-prefill": _OCP,
    "float8-blocks": _OCP,
    "float8-experts-decode": _OCP,
    "float8-experts-prefill": _OCP,
    "float8-other-codes": frozenset({"gfx942"}),
}
"""Targets of some launches: with float8 dtypes those that support these (others use codes in uint8), with much shared
memory those that have it."""


def launches_for(name: str, target: str) -> list[Any]:
    """The recorded launches of a name, with the tile sizes for a target."""
    compiled = import_module("platforms.triton-kernels.tests.compiled")
    with (
        compiled.launches() as caught,
        torch.device("meta"),  # tensors without content
        mock.patch.object(attention, "shared_memory", lambda _: compiled.SHARED_MEMORY[target]),
        mock.patch.object(attention, "warp_size", lambda _: compiled.TARGETS[target].warp_size),
        mock.patch.object(attention, "has_tensor_memory", lambda _: target in ("sm_100", "sm_103")),
        mock.patch.object(attention, "processors", lambda _: 132),
        compiled.device_like(target),
    ):
        LAUNCHES[name]()
    return list(caught)


def main(targets: list[str], names: list[str]) -> int:
    """Compiles for the targets, and returns how many launches did not fit."""
    compiled = import_module("platforms.triton-kernels.tests.compiled")
    failed = 0
    for asked in names or LAUNCHES:
        name, _, own = asked.partition("@")
        for target in own.split(",") if own else targets:
            if target not in TAKEN_BY.get(name, {target}):
                continue
            for launch in launches_for(name, target):
                found = compiled.compile_for(launch, target)
                fits = found.shared <= compiled.SHARED_MEMORY[target]
                failed += not fits
                print(f"{name:28}", found, "" if fits else "DOES NOT FIT", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].split(","), sys.argv[2:]))
