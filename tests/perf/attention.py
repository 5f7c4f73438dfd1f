"""Speed of CPU attention compared with the machine's limits: memory bandwidth for decode, the GEMM rate for prefill.

    python tests/perf/attention.py [--models S,M] [--kv-dtypes bfloat16,int8] [--decode 64,512,4096] [--prefill 2048]
    python tests/perf/attention.py --models M --batches 1 --decode 8192,32768 --prefill 8192,32768 [--dtype float32]

Decode: one new token per request. Calls alternate between the caches of many layers, so that no layer finds its keys
and values in the CPU's cache. The floor is the bytes of all keys and values (padding excluded) divided by the read
bandwidth, which is measured before and after each row because it changes from minute to minute. Prefill: one prompt
from position 0. The floor is the multiply-adds under the causal diagonal divided by torch's rate in a large matrix
product of the same dtype.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mvllm.plugin_api import AttentionSpec, BatchLayout
from mvllm_cpu import kernels
from mvllm_cpu.paged_attention import PagedAttention

HEADS = {"S": (12, 12, 64), "M": (16, 8, 128), "wide": (32, 4, 128)}
HOST = torch.device("cpu")
BEYOND_CACHES = 160 << 20

READ = r"""
#include <stddef.h>
#include <stdint.h>
uint64_t read_all(const uint64_t* p, size_t n) {
    uint64_t sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (size_t i = 0; i < n / 64; ++i) {
        uint64_t s = 0;
        for (size_t k = 0; k < 64; ++k) s += p[i * 64 + k];
        sum += s;
    }
    return sum;
}
"""


def best(call: Callable[[], object], seconds: float = 0.15, least: int = 3) -> float:
    """Seconds of the fastest call."""
    found, end = [], time.perf_counter() + seconds
    while len(found) < least or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)


def median(call: Callable[[], object], seconds: float = 0.2, least: int = 5) -> float:
    """Median seconds of a call."""
    found, end = [], time.perf_counter() + seconds
    while len(found) < least or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return sorted(found)[len(found) // 2]


class Bandwidth:
    """Reads a buffer larger than the CPU's caches with all threads."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        source, library = Path(self._folder.name) / "read.c", Path(self._folder.name) / "read.so"
        source.write_text(READ)
        command = ["gcc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        self._read = ctypes.CDLL(str(library)).read_all
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._buffer = np.ones(BEYOND_CACHES // 8, dtype=np.uint64)

    def measure(self) -> float:
        """Bytes per second."""
        call = lambda: self._read(self._buffer.ctypes.data, len(self._buffer))  # noqa: E731
        return BEYOND_CACHES / best(call, 0.05)


def gemm_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of torch's matrix product."""
    a, b = torch.randn(2048, 1024).to(dtype), torch.randn(1024, 4096).to(dtype)
    return 2 * 2048 * 1024 * 4096 / best(lambda: a @ b, 0.3)


def layout_of(requests: list[tuple[int, int]], block_size: int, rng: np.random.Generator) -> BatchLayout:
    """Attention metadata of a step of (computed tokens, new tokens) per request, with blocks in random order."""
    starts = np.concatenate([[0], np.cumsum([new for _, new in requests])]).astype(np.int32)
    seq_lens = np.array([sum(request) for request in requests], dtype=np.int32)
    needs = -(-seq_lens // block_size)
    ids = rng.permutation(int(needs.sum())).astype(np.int32)
    table = np.zeros((len(requests), int(needs.max())), dtype=np.int32)
    slots = []
    for r, need in enumerate(needs):
        table[r, :need], ids = ids[:need], ids[need:]
        at = np.arange(requests[r][0], seq_lens[r])
        slots.append(table[r, at // block_size] * block_size + at % block_size)
    arrays = (starts, seq_lens, table, np.concatenate(slots).astype(np.int32))
    lengths = [new for _, new in requests]
    device = tuple(torch.from_numpy(array) for array in arrays)
    return BatchLayout(len(requests), int(starts[-1]), max(lengths), int(seq_lens.max()), block_size, *arrays, *device)


def fill(backend: PagedAttention, num_blocks: int, block_size: int) -> object:
    """A layer's KV cache filled with random values."""
    spec, kv = backend.spec, backend.allocate(num_blocks, block_size, HOST)
    rng = np.random.default_rng(1)
    for begin in range(0, num_blocks, 256):
        blocks = np.arange(begin, min(begin + 256, num_blocks), dtype=np.int32)
        tokens = len(blocks) * block_size
        layout = layout_of([(0, tokens)], block_size, rng)
        layout.slot_mapping[:] = np.arange(tokens) + begin * block_size
        content = torch.randn(tokens, spec.num_kv_heads, spec.head_size).to(getattr(torch, spec.dtype))
        backend.write_kv(kv, content, content, backend.build_metadata(layout))
    return kv


def spec_of(model: str, dtype: str, kv_dtype: str) -> AttentionSpec:
    heads, kv_heads, size = HEADS[model]
    return AttentionSpec(heads, kv_heads, size, dtype, kv_dtype, size**-0.5)


def decode(model: str, dtype: str, kv_dtype: str, batch: int, context: int, bandwidth: Bandwidth) -> None:
    backend, rng = PagedAttention(spec_of(model, dtype, kv_dtype)), np.random.default_rng(0)
    spec, block_size = backend.spec, backend.kv_layout().block_sizes[0]
    layout = layout_of([(context - 1, 1)] * batch, block_size, rng)
    num_blocks = int(layout.block_table.max()) + 1
    itemsize = getattr(torch, kv_dtype).itemsize
    scales = 8 if itemsize == 1 else 0
    useful = batch * context * spec.num_kv_heads * (2 * spec.head_size * itemsize + scales)
    layers = max(2, min(48, -(-BEYOND_CACHES // useful)))
    caches = [fill(backend, num_blocks, block_size) for _ in range(layers)]
    query = torch.randn(batch, spec.num_heads, spec.head_size).to(getattr(torch, dtype))
    metadata = backend.build_metadata(layout)

    def step() -> None:
        for kv in caches:
            backend.forward(query, kv, metadata)

    step()
    before = bandwidth.measure()
    seconds = median(step) / layers
    rate, floor = useful / seconds, (before + bandwidth.measure()) / 2
    note = "" if useful * layers >= BEYOND_CACHES else "  (fits the caches)"
    print(
        f"{model:>5} {kv_dtype:>9} decode  {batch:>3} x {context:<5} {seconds * 1e6:>9.1f} us"
        f" {rate / 1e9:>7.1f} of {floor / 1e9:>5.1f} GB/s  {rate / floor:>5.2f}{note}",
        flush=True,
    )


def prefill(model: str, dtype: str, kv_dtype: str, tokens: int, chunk: int, gemm: float) -> None:
    """A prompt in chunks of `chunk` tokens; all chunks are timed together."""
    backend, rng = PagedAttention(spec_of(model, dtype, kv_dtype)), np.random.default_rng(0)
    spec, block_size = backend.spec, backend.kv_layout().block_sizes[0]
    kv = fill(backend, -(-tokens // block_size), block_size)
    steps = [
        backend.build_metadata(layout_of([(begin, min(chunk, tokens - begin))], block_size, rng))
        for begin in range(0, tokens, chunk)
    ]
    query = torch.randn(tokens, spec.num_heads, spec.head_size).to(getattr(torch, dtype))
    key = torch.randn(tokens, spec.num_kv_heads, spec.head_size).to(getattr(torch, dtype))

    def attend() -> None:
        for i, metadata in enumerate(steps):
            backend.forward(query[i * chunk : (i + 1) * chunk], kv, metadata)

    def store() -> None:
        for i, metadata in enumerate(steps):
            backend.write_kv(kv, key[i * chunk : (i + 1) * chunk], key[i * chunk : (i + 1) * chunk], metadata)

    attend()
    seconds, storing = median(attend), median(store)
    rate = 4 * spec.num_heads * spec.head_size * tokens * (tokens + 1) / 2 / seconds
    print(
        f"{model:>5} {kv_dtype:>9} prefill {tokens:>5} by {chunk:<5} {seconds * 1e3:>7.2f} ms"
        f" {rate / 1e9:>7.1f} of {gemm / 1e9:>5.1f} GFLOP/s {rate / gemm:>5.2f}; storing keys and values"
        f" {storing * 1e3:.2f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="S,M")
    parser.add_argument("--kv-dtypes", default=None)
    parser.add_argument("--decode", default="64,512,4096", help="contexts")
    parser.add_argument("--batches", default="1,16,32")
    parser.add_argument("--prefill", default="2048", help="tokens of a prompt")
    parser.add_argument("--dtype", default="bfloat16", help="of the computation, and of the KV cache by default")
    options = parser.parse_args()
    bandwidth = Bandwidth()
    print(f"{kernels.load().isa}, {torch.get_num_threads()} threads")
    for model in options.models.split(","):
        for kv_dtype in (options.kv_dtypes or options.dtype).split(","):
            for context in map(int, filter(None, options.decode.split(","))):
                for batch in map(int, options.batches.split(",")):
                    decode(model, options.dtype, kv_dtype, batch, context, bandwidth)
            for tokens in map(int, filter(None, options.prefill.split(","))):
                gemm = gemm_rate(getattr(torch, options.dtype))
                for chunk in (tokens, 512):
                    prefill(model, options.dtype, kv_dtype, tokens, chunk, gemm)


if __name__ == "__main__":
    main()
