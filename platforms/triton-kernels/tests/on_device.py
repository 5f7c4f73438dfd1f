"""Checks the kernels on a device: correct results, graph capture, and speed compared with the device's limits.

    python -m platforms.triton-kernels.tests.on_device [numerics] [graphs] [speed] [products] [tiles]

Needs only torch with its Triton and this package. Speeds are measured by replaying captured graphs, and printed
relative to a memory copy and a bfloat16 matrix product in the same run. `products` is the part of `speed` about
products and experts. `tiles` tries other tile sizes than those of
`mvllm_triton.tiles` for the same launches and prints the best.

Without a device `numerics` runs on the host with Triton's interpreter.
"""

# ruff: noqa: B023  (functions are called in the same loop iteration)

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

if not torch.cuda.is_available():  # HIP devices have this name, too
    importlib.import_module("platforms.triton-kernels.tests.interpreter")

from mvllm_triton import (
    attention,
    float8_linear,
    float8_weight,
    moe,
    norm,
    packed_experts,
    quantized_linear,
    quantized_moe,
    rotary_embedding,
    sampling,
)
from mvllm_triton.activation import silu_and_mul
from mvllm_triton.argmax import argmax
from mvllm_triton.reshape_and_cache import reshape_and_cache
from mvllm_triton.tiles import AttentionTiles

BF16 = torch.bfloat16


@dataclass
class Paged:
    """Requests of equal length with random keys and values, in blocks in random order."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    query_len: int
    length: int

    @classmethod
    def make(
        cls,
        device: str,
        requests: int,
        query_len: int,
        length: int,
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        block_size: int = 16,
    ) -> Paged:
        """`heads` are query heads, key/value heads and elements of each."""
        blocks = -(-length // block_size)
        cache = (requests * blocks, block_size, heads[1], heads[2])
        table = torch.randperm(requests * blocks, device=device, dtype=torch.int32).view(requests, blocks)
        return cls(
            torch.randn(requests * query_len, heads[0], heads[2], device=device, dtype=dtype),
            torch.randn(cache, device=device, dtype=dtype),
            torch.randn(cache, device=device, dtype=dtype),
            table,
            torch.arange(requests + 1, device=device, dtype=torch.int32) * query_len,
            torch.full((requests,), length, device=device, dtype=torch.int32),
            query_len,
            length,
        )

    def run(self, seq_lens: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        tables = self.table, self.starts, self.lens if seq_lens is None else seq_lens
        hints = {"max_query_len": self.query_len, "max_seq_len": self.length, "scale": self.q.shape[2] ** -0.5}
        return attention.paged_attention(self.q, self.k_cache, self.v_cache, *tables, **hints | options)

    def run_uneven(self) -> float:
        """Error of a decode whose first request has all the keys, the others a few."""
        lens = self.lens.clone()
        lens[1:] = torch.arange(1, len(lens), device=lens.device) * 5
        exact = self.exact()[:1]
        found = self.run(seq_lens=lens)
        one = self.run(seq_lens=lens, splits=1)
        return max(_off(found[:1], exact), _off(found, one))

    def exact(self, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
        """Dense attention in float64 over the content of the caches."""
        found = []
        group = self.q.shape[1] // self.k_cache.shape[2]
        for r, q in enumerate(self.q.double().split(self.query_len)):
            blocks = self.table[r].long()
            k, v = (
                c[blocks].flatten(0, 1)[: self.length].double().repeat_interleave(group, 1)
                for c in (self.k_cache, self.v_cache)
            )
            scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            at = torch.arange(self.length - self.query_len, self.length, device=q.device)[:, None]
            key_at = torch.arange(self.length, device=q.device)
            hidden = key_at > at
            if window is not None:
                hidden |= key_at <= at - window
            found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v))
        return torch.cat(found)


def _off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference, relative to the largest element."""
    return float((found.double() - exact.double()).abs().max() / exact.double().abs().max())


def numerics(device: str, small: bool) -> bool:
    """Prints each kernel's error relative to torch in float64; returns whether all errors are within the tolerance."""
    rows: list[tuple[str, float, float]] = []
    allowed = {torch.float32: 1e-4, BF16: 2e-2, torch.float16: 3e-3}
    lengths = (70,) if small else (70, 1000, 5000)
    for dtype, length, query_len in itertools.product(allowed, lengths, (1, 5) if small else (1, 5, 64)):
        for size in (80,) if small else (64, 80, 128, 256, 512):
            paged = Paged.make(device, 3, query_len, length, (8, 2, size), dtype)
            for features in ({}, {"window": 50}, {"soft_cap": 5.0}):
                found, exact = paged.run(**features), paged.exact(**features)  # type: ignore[arg-type]
                what = f"attention {dtype} {query_len} of {length}, heads of {size}, {features}"
                rows.append((what, _off(found, exact), allowed[dtype]))
        if query_len == 1:
            uneven = paged.run_uneven()
            rows.append((f"attention {dtype} of uneven requests", uneven, allowed[dtype]))
            split = paged.run(splits=5)
            rows.append((f"attention {dtype} {length} in splits", _off(split, paged.exact()), allowed[dtype]))
    x, weight = torch.randn(7, 512, device=device), torch.randn(512, device=device)
    plain = torch.nn.functional.rms_norm(x.double(), (512,), weight.double(), 1e-6)
    rows.append(("rms_norm", _off(norm.rms_norm(x, weight, 1e-6), plain), 1e-5))
    gate, up = x.double().chunk(2, dim=1)
    rows.append(("silu_and_mul", _off(silu_and_mul(x), torch.nn.functional.silu(gate) * up), 1e-5))
    rows.append(("argmax", float((argmax(x)[1] != x.argmax(1)).any()), 0.0))
    ids = torch.stack([torch.randperm(6, device=device)[:2] for _ in range(7)])
    shares = torch.rand(7, 2, device=device)
    gate_up, down = torch.randn(6, 96, 512, device=device), torch.randn(6, 512, 48, device=device)
    total = torch.zeros(7, 512, device=device, dtype=torch.float64)
    for token, which in itertools.product(range(7), range(2)):
        expert = int(ids[token, which])
        gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
        inner = torch.nn.functional.silu(gate) * up
        total[token] += shares[token, which] * (down[expert].double() @ inner)
    rows.append(("moe", _off(moe.moe(x, gate_up, down, ids, shares), total), 1e-4))
    for wide in (torch.float32, BF16):
        f8 = torch.randn(64, 512, device=device).to(torch.float8_e4m3fn)
        codes, scales = float8_linear.scaled_fp8_quant(x.to(wide))
        exact = (codes.double() * scales.double()) @ f8.double().T
        for native in (False,) if small else (False, True):
            found = float8_linear.float8_linear(x.to(wide), f8, torch.ones(1, device=device), native=native)
            rows.append(
                (f"float8 product, {wide}, native {native}", _off(found, exact), 1e-4 if wide != BF16 else 1e-2)
            )
        for bits, int8 in itertools.product((8, 4), (False, True)):
            packed, matrix = _integers(device, 64, 512, bits, int8)
            found = quantized_linear.quantized_linear(x.to(wide), packed, None)
            exact = x.to(wide).double() @ matrix.double().T
            rows.append((f"int{bits} product, {wide}, int8 activations {int8}", _off(found, exact), 2e-2))
    rows += _numerics_of_packed_experts(device, small)
    rows += _numerics_of_the_library(device, small)
    right = True
    for what, off, limit in rows:
        right &= off <= limit  # False for NaN
        if not off <= limit:
            print(f"WRONG  {what}: {off:.3g}, allowed {limit:g}")
    print(f"numerics: {len(rows)} results, {'all right' if right else 'some WRONG'}")
    return right


KINDS = ("mxfp4", "float8", "float8, rounded", "int4", "int8, rounded")
"""Kinds of packed experts."""


def _numerics_of_packed_experts(device: str, small: bool) -> list[tuple[str, float, float]]:
    rows = []
    hidden, inner, experts, top_k = (192, 160, 4, 2) if small else (2880, 1440, 16, 4)
    for kind, tokens in itertools.product(KINDS, (3,) if small else (1, 3, 40, 700)):
        x = torch.randn(tokens, hidden, device=device, dtype=BF16)
        made = [
            [_expert(device, kind, *size) for _ in range(experts)] for size in ((2 * inner, hidden), (hidden, inner))
        ]
        packed = quantized_moe.pack(tuple([weight for weight, _ in each] for each in made), native=not small)
        up, down = (torch.stack([floats for _, floats in each]) for each in made)
        ids = torch.stack([torch.randperm(experts, device=device)[:top_k] for _ in range(tokens)])
        shares = torch.rand(tokens, top_k, device=device)
        biases = [torch.randn(experts, size, device=device, dtype=BF16) for size in (2 * inner, hidden)]
        clamp = (1.702, 7.0)
        found = quantized_moe.quantized_moe(x, packed[0], biases[0], packed[1], biases[1], ids, shares, *clamp)
        total = torch.zeros(tokens, hidden, device=device)
        for token, which in itertools.product(range(tokens), range(top_k)):
            e = int(ids[token, which])
            gate, above = (up[e] @ x[token].float() + biases[0][e].float()).chunk(2)
            gate, above = gate.clamp(max=clamp[1]), above.clamp(-clamp[1], clamp[1])
            result = down[e] @ ((above + 1) * gate * torch.sigmoid(clamp[0] * gate)) + biases[1][e].float()
            total[token] += shares[token, which] * result
        rows.append((f"experts of {kind}, {tokens} tokens", _off(found, total), 0.1 if "rounded" in kind else 3e-2))
    return rows


def _expert(device: str, kind: str, out_features: int, in_features: int) -> tuple[Any, torch.Tensor]:
    """A weight of one expert, and its matrix in float32."""
    scale = in_features**-0.5
    if kind == "mxfp4":
        groups = -(-in_features // 32)
        blocks = torch.randint(0, 256, (out_features, groups, 17), device=device, dtype=torch.uint8)
        blocks[..., 0] = 127 + round(math.log2(scale)) - (blocks[..., 0] & 3)
        codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), dim=2).long()
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
        values = torch.cat((numbers, -numbers))[codes] * torch.exp2(blocks[..., :1].float() - 127)
        return _Blocks((_Part("mxfp4", blocks.flatten(1)),), in_features), values.flatten(1)
    if kind.startswith("float8"):
        codes = torch.randn(out_features, in_features, device=device).to(torch.float8_e4m3fn)
        block = 32  # divides all sizes
        scales = (torch.rand(out_features // block, in_features // block, device=device) + 0.5) * scale
        wide = codes.float() * scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
        inputs = "dynamic" if "rounded" in kind else "floats"
        return _Floats(codes.view(torch.uint8), scales, block, block, inputs), wide
    bits = int(kind[3])
    middle = 2 ** (bits - 1)
    values = torch.randint(-middle, middle, (out_features, in_features), device=device, dtype=torch.int8)
    scales = (torch.rand(out_features, in_features // 32, device=device) + 0.5) * scale / middle
    zeros = torch.randint(-middle, middle, scales.shape, device=device, dtype=torch.int8) // 4
    wide = (values - zeros.repeat_interleave(32, 1).float()) * scales.repeat_interleave(32, 1)
    return _Weight(values, scales, zeros, 32, bits, "rounded" in kind), wide


def _numerics_of_the_library(device: str, small: bool) -> list[tuple[str, float, float]]:
    """Products of 8-bit floats, by the library if it computes them, for both layouts of scales."""
    rows = []
    for static, has_bias in itertools.product((False, True), repeat=2):
        codes = torch.randn(256, 512, device=device).to(torch.float8_e4m3fn)
        input_scale = torch.full((1,), 0.02, device=device) if static else None
        weight = _Floats(codes.view(torch.uint8), torch.full((1, 1), 0.5, device=device), 256, 512,
                         "static" if static else "dynamic", input_scale)  # fmt: skip
        packed = float8_weight.pack(weight, native=not small)
        x = torch.randn(17, 512, device=device, dtype=BF16)
        bias = torch.randn(256, device=device, dtype=BF16) if has_bias else None
        exact = x.double() @ codes.double().T * 0.5 + (0 if bias is None else bias.double())
        found = float8_weight.float8_product(x, packed, bias)
        by = "the library" if (BF16, has_bias) in packed.library else "our kernel"
        rows.append((f"float8 product by {by}, static {static}, bias {has_bias}", _off(found, exact), 4e-2))
        print(rows[-1][0])
    return rows


def _integers(
    device: str, out_features: int, in_features: int, bits: int, int8: bool
) -> tuple[quantized_linear.PackedIntegers, torch.Tensor]:
    """A packed weight with groups of 128 columns, and the dequantized matrix."""
    middle = 2 ** (bits - 1)
    values = torch.randint(-middle + 1, middle, (out_features, in_features), device=device, dtype=torch.int8)
    scales = torch.rand(out_features, in_features // 128, device=device) + 0.5
    weight = _Weight(values, scales, None, 128, bits, int8)
    return quantized_linear.pack(weight), values.float() * scales.repeat_interleave(128, 1)


@dataclass(frozen=True)
class _Weight:
    values: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    group_size: int
    bits: int
    int8_activations: bool


@dataclass(frozen=True)
class _Floats:
    codes: torch.Tensor
    scales: torch.Tensor
    block_rows: int
    block_columns: int
    inputs: str
    input_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class _Part:
    format: str
    data: torch.Tensor


@dataclass(frozen=True)
class _Blocks:
    parts: tuple[_Part, ...]
    in_features: int


def graphs(device: str) -> bool:
    """Whether a captured step gives correct results when it is replayed with other lengths."""
    paged = Paged.make(device, 4, 1, 3000, (8, 2, 128), BF16)
    graph, out = _captured(paged.run)
    paged.lens.fill_(1700)
    graph.replay()
    paged.length = 1700
    off = _off(out, paged.exact())
    print(f"graphs: a decode captured at 3000 tokens and replayed at 1700 is off by {off:.3g}")
    return off <= 2e-2


def _captured(function: Callable[[], Any]) -> tuple[Any, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


def seconds(function: Callable[[], Any], repeats: int = 20) -> float:
    """Duration of one call, replayed from a graph."""
    graph, _ = _captured(function)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


DECODES = [(batch, length) for length in (1024, 8192) for batch in (1, 16, 64, 256)]
PREFILLS = [2048, 8192, 32768]
LLAMA = (32, 8, 128)


def _decode_bytes(batch: int, length: int, itemsize: int) -> int:
    return 2 * batch * length * LLAMA[1] * LLAMA[2] * itemsize


def _prefill_flops(length: int) -> float:
    return 2.0 * length * length * LLAMA[0] * LLAMA[2]  # two products, half of each masked


def _shown(device: str) -> Callable[..., None]:
    """Measures the device's limits; the result prints a rate and its share of them."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    a = torch.randn(8192, 8192, device=device, dtype=BF16)
    product = 2 * 8192**3 / seconds(lambda: a @ a)
    print(f"limits: copy {copy / 1e9:.0f} GB/s, bfloat16 product {product / 1e12:.0f} TFLOP/s")

    def show(what: str, time: float, *, moved: float = 0, computed: float = 0) -> None:
        rates = [f"{time * 1e6:9.1f} us"]
        if moved:
            rates.append(f"{moved / time / 1e9:6.0f} GB/s = {moved / time / copy:5.1%} of copy")
        if computed:
            rates.append(f"{computed / time / 1e12:6.1f} TFLOP/s = {computed / time / product:5.1%} of product")
        print(f"{what:52}", *rates, flush=True)

    return show


def products(device: str) -> None:
    """The part of `speed` about products and experts."""
    show = _shown(device)
    _speed_of_products(device, show)
    _speed_of_packed_experts(device, show)


def speed(device: str) -> None:
    """Prints rates, and their share of the device's limits. Small tensors stay in caches and may exceed the limits."""
    show = _shown(device)
    for batch, length in DECODES:
        paged = Paged.make(device, batch, 1, length, LLAMA, BF16)
        show(f"decode, batch {batch}, {length} tokens", seconds(paged.run), moved=_decode_bytes(batch, length, 2))
        scales = torch.rand(paged.k_cache.shape[:3], device=device)
        for kind in (torch.float8_e4m3fn, torch.uint8):
            paged.k_cache = paged.k_cache.to(torch.float8_e4m3fn).view(kind)
            paged.v_cache = paged.v_cache.to(torch.float8_e4m3fn).view(kind)
            time = seconds(lambda: paged.run(k_scale=scales, v_scale=scales))
            show(f"    the same in {kind}", time, moved=_decode_bytes(batch, length, 1))
            paged.k_cache, paged.v_cache = (c.view(torch.float8_e4m3fn) for c in (paged.k_cache, paged.v_cache))
    paged = Paged.make(device, 16, 1, 100_000, LLAMA, BF16)
    lens = torch.full((16,), 1000, device=device, dtype=torch.int32)
    lens[:1] = 100_000
    moved = _decode_bytes(1, 115_000, 2)
    show("decode, one of 16 requests has 100000 tokens", seconds(lambda: paged.run(seq_lens=lens)), moved=moved)
    del paged
    for length in PREFILLS:
        paged = Paged.make(device, 1, length, length, LLAMA, BF16)
        show(f"prefill, {length} tokens", seconds(paged.run, 3), computed=_prefill_flops(length))
    for rows in (16, 2048):
        x, weight = torch.randn(rows, 4096, device=device, dtype=BF16), torch.ones(4096, device=device, dtype=BF16)
        show(f"rms_norm, {rows} rows", seconds(lambda: norm.rms_norm(x, weight, 1e-6)), moved=2 * x.nbytes)
        residual = x.clone()
        time = seconds(lambda: norm.fused_add_rms_norm(x, residual, weight, 1e-6))
        show(f"fused_add_rms_norm, {rows} rows", time, moved=4 * x.nbytes)
        wide = torch.randn(rows, 2 * 14336, device=device, dtype=BF16)
        show(f"silu_and_mul, {rows} rows", seconds(lambda: silu_and_mul(wide)), moved=1.5 * wide.nbytes)
        heads, index = x.view(rows, 32, 128), torch.zeros(rows, device=device, dtype=torch.int32)
        angles = torch.randn(64, 128, device=device)
        show(
            f"rotary_embedding, {rows} rows",
            seconds(lambda: rotary_embedding.rotary_embedding(index, heads, heads[:, :8], angles)),
        )
        cache = torch.zeros(rows, 16, 8, 128, device=device, dtype=BF16)
        slots = torch.arange(rows, device=device, dtype=torch.int32)
        show(
            f"reshape_and_cache, {rows} rows",
            seconds(lambda: reshape_and_cache(heads[:, :8], heads[:, 8:16], cache, cache, slots)),
        )
    _speed_of_products(device, show)
    _speed_of_packed_experts(device, show)
    logits, each = torch.randn(64, 151936, device=device), torch.ones(64, device=device)
    show("argmax, 64 rows of 151936", seconds(lambda: argmax(logits)), moved=logits.nbytes)
    given = (logits, each, each * -math.inf, torch.full((64,), 50, device=device), each * 0.9, each * 0.5, each * 0.5)
    show("sample, 64 rows of 151936, top_k and top_p", seconds(lambda: sampling.sample(*given)))


def _speed_of_products(device: str, show: Callable[..., None]) -> None:
    for tokens, (in_features, out_features) in itertools.product((1, 16), ((4096, 14336), (14336, 4096), (4096, 1024))):
        x = torch.randn(tokens, in_features, device=device, dtype=BF16)
        weight = torch.randn(out_features, in_features, device=device, dtype=BF16)
        what = f"product, {tokens} rows, {in_features} to {out_features}"
        show(what, seconds(lambda: torch.nn.functional.linear(x, weight)), moved=weight.nbytes)
        packed, _ = _integers(device, out_features, in_features, 4, False)
        show("    int4", seconds(lambda: quantized_linear.quantized_linear(x, packed, None)), moved=packed.data.nbytes)
        codes, scale = weight.to(torch.float8_e4m3fn), torch.ones(out_features, 1, device=device)
        time = seconds(lambda: float8_linear.float8_linear(x, codes, scale))
        show("    float8", time, moved=codes.nbytes)
        _speed_of_the_library(x, codes, show)
    for tokens in (1, 16, 64, 2048):
        x = torch.randn(tokens, 4096, device=device, dtype=BF16)
        weight = torch.randn(4096, 4096, device=device, dtype=BF16)
        flops = 2.0 * tokens * 4096 * 4096
        time = seconds(lambda: torch.nn.functional.linear(x, weight))
        show(f"torch's product, {tokens} rows of 4096", time, moved=weight.nbytes, computed=flops)
        for bits, int8 in itertools.product((8, 4), (False, True)):
            packed, _ = _integers(device, 4096, 4096, bits, int8)
            time = seconds(lambda: quantized_linear.quantized_linear(x, packed, None))
            what = f"    int{bits}{', int8 activations' if int8 else ''}"
            show(what, time, moved=packed.data.nbytes, computed=flops)
        f8 = weight.to(torch.float8_e4m3fn)
        for block, shape in ((None, (4096, 1)), ((128, 128), (32, 32))):
            scale = torch.ones(shape, device=device)
            time = seconds(lambda: float8_linear.float8_linear(x, f8, scale, block=block))
            show(f"    float8{' by block' if block else ''}", time, moved=f8.nbytes, computed=flops)
        _speed_of_the_library(x, f8, show)
    gate_up = torch.randn(128, 1536, 2048, device=device, dtype=BF16)
    down = torch.randn(128, 2048, 768, device=device, dtype=BF16)
    for tokens in (1, 16, 64, 2048):
        x = torch.randn(tokens, 2048, device=device, dtype=BF16)
        ids = (torch.arange(tokens * 8, device=device) % 128).view(tokens, 8)
        shares = torch.rand(tokens, 8, device=device)
        touched = min(128, tokens * 8) * (gate_up[0].nbytes + down[0].nbytes)
        flops = 2.0 * tokens * 8 * (gate_up[0].numel() + down[0].numel())
        time = seconds(lambda: moe.moe(x, gate_up, down, ids, shares))
        show(f"128 experts, {tokens} rows", time, moved=touched, computed=flops)


def _speed_of_the_library(x: torch.Tensor, codes: torch.Tensor, show: Callable[..., None]) -> None:
    """A scale for each row of inputs, and the rounding of the inputs."""
    scales = torch.ones(len(codes), 1, device=x.device)
    weight = _Floats(codes.view(torch.uint8), scales, 1, x.shape[1], "dynamic")
    packed = float8_weight.pack(weight)
    if (x.dtype, False) in packed.library:
        time = seconds(lambda: float8_weight.float8_product(x, packed, None))
        show("    float8 by the library", time, moved=codes.nbytes, computed=2.0 * len(x) * codes.numel())


def _packed(device: str, kind: int, experts: int, rows: int, columns: int) -> packed_experts.PackedExperts:
    """Random packed weights."""
    packs = kind in (packed_experts.MXFP4, packed_experts.INT4)
    data = torch.randint(0, 120, (experts, rows, columns // 2 if packs else columns), device=device, dtype=torch.uint8)
    if kind == packed_experts.MXFP4:
        scales = torch.full((experts, -(-columns // 128), rows), 0x78787878, device=device, dtype=torch.int32)
        return packed_experts.PackedExperts(kind, data, scales, None, 128, 1, 128, columns, rows)
    is_float = kind == packed_experts.FLOAT8
    data = data.view(torch.float8_e4m3fn) if is_float else data
    scales = torch.full((experts, columns // 128, rows // 128 if is_float else rows), 0.01, device=device)
    sizes = 128, 128 if is_float else 1, 128, columns, rows
    return packed_experts.PackedExperts(kind, data, scales, None, *sizes, rounded=is_float, native=is_float)


def _speed_of_packed_experts(device: str, show: Callable[..., None]) -> None:
    models = (
        ("GPT-OSS-120B, mxfp4", packed_experts.MXFP4, 128, 4, 2880, 2880),
        ("Qwen3-30B-A3B, float8", packed_experts.FLOAT8, 128, 8, 2048, 768),
        ("Qwen3-30B-A3B, int4", packed_experts.INT4, 128, 8, 2048, 768),
    )
    for name, kind, experts, top_k, hidden, inner in models:
        up, down = _packed(device, kind, experts, 2 * inner, hidden), _packed(device, kind, experts, hidden, inner)
        clamp = (1.702, 7.0) if kind == packed_experts.MXFP4 else (None, None)
        for tokens in (1, 4, 16, 64, 256, 2048):
            x = torch.randn(tokens, hidden, device=device, dtype=BF16)
            ids = (torch.arange(tokens * top_k, device=device) % experts).view(tokens, top_k)
            shares = torch.rand(tokens, top_k, device=device)
            touched = min(experts, tokens * top_k) * (up.nbytes + down.nbytes) / experts
            flops = 2.0 * tokens * top_k * 3 * hidden * inner
            time = seconds(lambda: quantized_moe.quantized_moe(x, up, None, down, None, ids, shares, *clamp))
            show(f"{name}, {tokens} tokens", time, moved=touched, computed=flops)


def tiles(device: str) -> None:
    """Prints, for decodes and prefills, the fastest tile sizes and those of `mvllm_triton.tiles`."""
    usual = attention.attention_tiles
    launches = [(f"decode {b} of {n}", (b, 1, n), (16,)) for b, n in ((1, 8192), (16, 8192), (64, 8192), (256, 1024))]
    launches += [(f"prefill of {n}", (1, n, n), (64, 128)) for n in PREFILLS[:2]]
    for what, shape, all_rows in launches:
        paged = Paged.make(device, *shape, LLAMA, BF16)
        found: list[tuple[float, str]] = [(seconds(paged.run, 5), "as they are")]
        for rows, columns, warps, stages in itertools.product(all_rows, (32, 64, 128), (2, 4, 8), (1, 2, 3, 4)):
            chosen = AttentionTiles(rows, columns, 4, rows // 4, warps, stages)
            attention.attention_tiles = lambda *_, chosen=chosen, **__: chosen
            try:
                found.append((seconds(paged.run, 5), str(chosen)))
            except Exception as e:  # tiles that do not fit: errors of the compiler or the driver
                found.append((math.inf, f"{chosen}: {type(e).__name__}"))
            finally:
                attention.attention_tiles = usual
        print(what, f"as they are {found[0][0] * 1e6:.1f} us")
        for time, which in sorted(found)[:4]:
            print(f"    {time * 1e6:9.1f} us  {which}", flush=True)


def main(wanted: list[str]) -> int:
    """Runs the given parts, by default all except `tiles`. Returns the exit status: 0 if all results were correct."""
    on_device = torch.cuda.is_available()
    device = "cuda" if on_device else "cpu"
    wanted = wanted or ["numerics", *(["graphs", "speed"] if on_device else [])]
    torch.manual_seed(0)
    right = True
    if "numerics" in wanted:
        right &= numerics(device, small=not on_device)
    if "graphs" in wanted:
        right &= graphs(device)
    if "speed" in wanted:
        speed(device)
    if "products" in wanted:
        products(device)
    if "tiles" in wanted:
        tiles(device)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
