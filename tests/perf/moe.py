"""The ops `moe` and `quantized_moe` on the CPU, compared with the machine's limit: python tests/perf/moe.py [--dtype
bfloat16] [--packed q4_k]

Few tokens are bound by reading the weights of the chosen experts, many by arithmetic. Both limits are measured in the
same run: the bandwidth by summing a buffer larger than the caches, the rate by torch's product of large matrices.
`--packed` measures experts with quantized weights and prints the bytes that a call reads per second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from mvllm.ops.dtypes import torch_dtype
from mvllm.ops.moe import moe as reference
from mvllm.plugin_api import Float8Weight, QuantizedWeight
from mvllm.testing.block_quantized_cases import block_quantized_weight
from mvllm_cpu import kernels
from mvllm_cpu.block_quantized_linear import FORMATS
from mvllm_cpu.moe import Moe
from mvllm_cpu.quantized_moe import QuantizedMoe

PACKED = (*FORMATS, "int8", "int4", "float8")


def seconds(call: Callable[[int], object], runs: int) -> float:
    """Median seconds; `call` gets the number of the run."""
    call(0)
    taken = []
    for i in range(1, runs + 1):
        start = time.perf_counter()
        call(i)
        taken.append(time.perf_counter() - start)
    return sorted(taken)[runs // 2]


def random_expert(format: str, rows: int, columns: int) -> object:
    """A matrix [rows, columns]: blocks of a GGUF file, integers with groups of 128 columns, or 8-bit floats."""
    if format in FORMATS:
        return block_quantized_weight(((format, rows),), columns, int8_activations=True)
    scales = torch.rand(rows, -(-columns // 128)) * columns**-0.5
    if format == "float8":
        codes = (torch.randn(rows, columns) * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return Float8Weight(codes, scales[::128].clone() / 128, 128, 128, "dynamic")
    middle = 128 if format == "int8" else 8
    values = torch.randint(1 - middle, middle, (rows, columns)).to(torch.int8)
    if format == "int8":
        return QuantizedWeight(values, scales[:, :1] / middle, None, columns, 8, int8_activations=True)
    return QuantizedWeight(values, scales / middle, None, min(128, columns), 4)


def measure_packed(args: argparse.Namespace, bandwidth: float) -> None:
    """Prints seconds, and bytes of chosen experts per second, for each number of tokens."""
    op, dtype = QuantizedMoe(kernels.load().library), torch_dtype(args.dtype)
    shapes = (2 * args.inner, args.hidden), (args.hidden, args.inner)
    gate_up, down = op.pack(tuple([random_expert(args.packed, *shape)] * args.experts for shape in shapes))
    expert_bytes = (gate_up.nbytes + down.nbytes) / args.experts
    print(f"{args.packed}: {expert_bytes / 1e6:.2f} MB per expert")
    print(f"{'tokens':>7} {'experts':>8} {'mvllm ms':>9} {'GB/s':>6} {'of bandwidth':>13}")
    for tokens in args.tokens:
        x = torch.randn(tokens, args.hidden).to(dtype)
        choices = [torch.rand(tokens, args.experts).topk(args.top_k, dim=1) for _ in range(8)]  # new experts each time
        weights = [torch.softmax(chosen.values, dim=-1) for chosen in choices]

        def run(i: int) -> None:
            routing = choices[i % 8].indices, weights[i % 8]  # noqa: B023
            op.quantized_moe(x, gate_up, None, down, None, *routing, None, None)  # noqa: B023

        used = sum(len(chosen.indices.unique()) for chosen in choices) / 8
        taken = seconds(run, 15 if tokens < 512 else 5)
        rate = used * expert_bytes / taken
        print(f"{tokens:>7} {used:>8.1f} {taken * 1e3:>9.2f} {rate / 1e9:>6.1f} {rate / bandwidth:>13.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 128, 2048])
    parser.add_argument("--reference-up-to", type=int, default=128, help="largest number of tokens for the reference")
    parser.add_argument("--packed", choices=PACKED, help="measure quantized_moe with such weights instead")
    args = parser.parse_args()
    dtype = torch_dtype(args.dtype)
    loaded = kernels.load()
    if loaded.library is None:
        raise SystemExit(f"There are no kernels to measure: {loaded.reason}")
    buffer = torch.ones(40 << 20, dtype=torch.float32)
    bandwidth = buffer.numel() * 4 / seconds(lambda _: buffer.sum(), 9)
    if args.packed:
        print(f"{loaded.quantized_isa}, {torch.get_num_threads()} threads; reads {bandwidth / 1e9:.0f} GB/s")
        measure_packed(args, bandwidth)
        return
    op = Moe(loaded.library)
    gate_up = torch.randn(args.experts, 2 * args.inner, args.hidden).mul_(args.hidden**-0.5).to(dtype)
    down = torch.randn(args.experts, args.hidden, args.inner).mul_(args.inner**-0.5).to(dtype)
    packed = op.pack((gate_up.clone(), down.clone()))

    a, b = torch.randn(2048, 1024).to(dtype), torch.randn(4096, 1024).to(dtype)
    rate = 2 * 2048 * 1024 * 4096 / seconds(lambda _: torch.nn.functional.linear(a, b), 7)
    print(
        f"{args.experts} experts of {args.hidden} x {args.inner}, top_k {args.top_k}, {args.dtype}, {loaded.isa}, "
        f"{torch.get_num_threads()} threads; reads {bandwidth / 1e9:.0f} GB/s, multiplies {rate / 1e9:.0f} GFLOP/s"
    )
    print(f"{'tokens':>7} {'experts':>8} {'mvllm ms':>9} {'limit ms':>9} {'of limit':>9} {'reference ms':>13}")
    expert_bytes = 3 * args.hidden * args.inner * dtype.itemsize
    for tokens in args.tokens:
        x = torch.randn(tokens, args.hidden).to(dtype)
        choices = [torch.rand(tokens, args.experts).topk(args.top_k, dim=1) for _ in range(8)]  # new experts each time

        def run(function: Callable[..., object], weights: tuple[object, object], i: int) -> None:
            chosen = choices[i % 8]  # noqa: B023
            function(x, *weights, chosen.indices, torch.softmax(chosen.values, dim=-1))  # noqa: B023

        used = sum(len(c.indices.unique()) for c in choices) / 8
        limit = max(used * expert_bytes / bandwidth, tokens * args.top_k * 6 * args.hidden * args.inner / rate)
        ours = seconds(lambda i: run(op.moe, packed, i), 15 if tokens < 512 else 5)
        line = f"{tokens:>7} {used:>8.1f} {ours * 1e3:>9.2f} {limit * 1e3:>9.2f} {limit / ours:>9.0%}"
        if tokens <= args.reference_up_to:
            theirs = seconds(lambda i: run(reference, (gate_up, down), i), 3)
            line += f" {theirs * 1e3:>13.1f}"
        print(line)


if __name__ == "__main__":
    main()
