"""Products with integer weights beside the machine's limits and torch's own kernels.

    OMP_NUM_THREADS=2 python tests/perf/quantized_linear.py

Few rows are bound by reading the weight: the table gives GB/s of packed bytes, beside the rate at which the same
threads read memory that is not in a cache. Many rows are bound by arithmetic: GOP/s (two per multiply-add), beside
torch._int_mm for int8 activations and the bf16 product of torch for weight-only. Each line of the first table passes
over as many copies of the weight as make 160 MiB, so that none is read from a cache; medians over rounds in which all
take turns, because the machine's bandwidth changes from minute to minute.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import run
from tempfile import TemporaryDirectory

import torch

from mvllm.plugin_api import QuantizedWeight
from mvllm_cpu import kernels
from mvllm_cpu.linear import Linear
from mvllm_cpu.quantized_linear import PackedQuantizedWeight, QuantizedLinear

COLD = 160 << 20
READ = """
#include <stdint.h>
#include <stddef.h>
double read_all(const double* p, size_t n) {
    double total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (size_t i = 0; i < n; i += 64) {
        double s[64];
        for (int k = 0; k < 64; k++) s[k] = p[i + k];
        for (int k = 0; k < 64; k++) total += s[k];
    }
    return total;
}
"""
SCHEMES = {
    "int8, int8 activations": (8, None, True),
    "int8, weight-only": (8, None, False),
    "int8, groups of 128": (8, 128, False),
    "int4, groups of 128": (4, 128, False),
    "int4, groups of 32": (4, 32, False),
    "int4, groups of 32, zeros": (4, 32, False),
}


def compiled_reader(folder: Path) -> ctypes.CDLL:
    """A function that reads memory with all threads, as fast as the machine can."""
    source, library = folder / "read.c", folder / "read.so"
    source.write_text(READ)
    command = ["cc", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC", source, "-o", library]
    run(command, check=True)
    reader = ctypes.CDLL(str(library))
    reader.read_all.restype = ctypes.c_double
    reader.read_all.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return reader


def seconds(function: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turns(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, all called once per round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            taken = seconds(function)
            if turn:
                times[name].append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}


def weight_of(name: str, out_features: int, in_features: int) -> QuantizedWeight:
    """Random integers in one of the SCHEMES."""
    bits, group_size, int8_activations = SCHEMES[name]
    group_size = group_size or in_features
    groups, top = -(-in_features // group_size), 2 ** (bits - 1)
    values = torch.randint(-top, top, (out_features, in_features), dtype=torch.int8)
    zeros = torch.randint(-top, top, (out_features, groups), dtype=torch.int8) if "zeros" in name else None
    scales = torch.rand(out_features, groups) * 0.01
    return QuantizedWeight(values, scales, zeros, group_size, bits, int8_activations)


def packed_bytes(weight: PackedQuantizedWeight) -> int:
    """What a product has to read."""
    zeros = 0 if weight.zero_points is None else weight.zero_points.nbytes
    return weight.values.nbytes + weight.scales.nbytes + zeros


def over(function: Callable[[object], object], weights: list[object]) -> Callable[[], object]:
    """Calls with every weight."""
    return lambda: [function(weight) for weight in weights]


def few_rows(op: QuantizedLinear, dense: Linear, shape: tuple[int, int], counts: list[int], rounds: int) -> None:
    """The first table."""
    out_features, in_features = shape
    sizes, packed = {}, {}
    for name in SCHEMES:
        one = op.pack(weight_of(name, *shape))
        copies = max(1, COLD // packed_bytes(one))
        packed[name] = [one, *(op.pack(weight_of(name, *shape)) for _ in range(copies - 1))]
        sizes[name] = packed_bytes(one) * copies
    plain = [torch.randn(out_features, in_features).bfloat16() for _ in range(COLD // (2 * out_features * in_features))]
    ours = [dense.pack(weight) for weight in plain]
    sizes["torch bf16"] = sizes["mvllm bf16"] = len(plain) * plain[0].nbytes
    memory = torch.ones(COLD // 8, dtype=torch.float64)
    with TemporaryDirectory() as folder:
        reader = compiled_reader(Path(folder))
        for rows in counts:
            x = torch.randn(rows, in_features).bfloat16()
            functions = {
                "read": lambda: reader.read_all(memory.data_ptr(), memory.numel()),
                **{
                    name: over(lambda w, x=x: op.quantized_linear(x, w, None), weights)
                    for name, weights in packed.items()
                },
                "mvllm bf16": over(lambda w, x=x: dense.linear(x, w, None), ours),
                "torch bf16": over(lambda w, x=x: torch.nn.functional.linear(x, w), plain),
            }
            times = in_turns(functions, rounds)
            limit = memory.nbytes / times["read"] / 1e9
            print(f"\n{rows} rows, {out_features}x{in_features}; read bandwidth {limit:.1f} GB/s")
            for name, size in sizes.items():
                rate = size / times[name] / 1e9
                calls = len(packed.get(name, plain))
                each = times[name] / calls * 1e6
                print(f"  {name:28} {rate:7.1f} GB/s {rate / limit:6.0%} of the limit {each:8.1f} us a call")


def many_rows(op: QuantizedLinear, dense: Linear, shape: tuple[int, int], counts: list[int], rounds: int) -> None:
    """The second table."""
    out_features, in_features = shape
    packed = {name: op.pack(weight_of(name, *shape)) for name in SCHEMES}
    plain = torch.randn(out_features, in_features).bfloat16()
    ours = dense.pack(plain)
    integers = torch.randint(-127, 128, (in_features, out_features), dtype=torch.int8)
    transposed = integers.t().contiguous().t()
    for rows in counts:
        x = torch.randn(rows, in_features).bfloat16()
        x8 = torch.randint(-127, 128, (rows, in_features), dtype=torch.int8)
        functions = {
            **{name: lambda w=w, x=x: op.quantized_linear(x, w, None) for name, w in packed.items()},
            "mvllm bf16": lambda x=x: dense.linear(x, ours, None),
            "torch bf16": lambda x=x: torch.nn.functional.linear(x, plain),
            "torch._int_mm (no scales)": lambda x8=x8: torch._int_mm(x8, transposed),
        }
        times = in_turns(functions, rounds)
        print(f"\n{rows} rows, {out_features}x{in_features}")
        for name, taken in times.items():
            rate = 2 * rows * out_features * in_features / taken / 1e9
            print(f"  {name:28} {rate:7.0f} GOP/s {taken * 1e6:9.1f} us")


def accuracy(op: QuantizedLinear, shape: tuple[int, int]) -> None:
    """Root mean square errors over the product's, against float64."""
    print("\nroot mean square error of the product / root mean square of the product, against float64")
    in_features = shape[1]
    x = torch.randn(64, in_features).bfloat16()
    for name in SCHEMES:
        weight = weight_of(name, *shape)
        exact = x.double() @ weight.dequantize().double().T
        size = exact.square().mean().sqrt()
        found = (op.quantized_linear(x, op.pack(weight), None).double() - exact).square().mean().sqrt() / size
        rounded = (exact.bfloat16().double() - exact).square().mean().sqrt() / size
        print(f"  {name:28} {found:.2e}; rounding the exact result to bfloat16 alone gives {rounded:.2e}")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--many", type=int, nargs="*", default=[32, 256, 2048])
    parser.add_argument("--shape", type=int, nargs=2, default=[2304, 768], metavar=("OUT", "IN"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    loaded = kernels.load()
    if loaded.library is None:
        raise SystemExit(f"The kernels are not there: {loaded.reason} {loaded.remedy or ''}")
    op, dense = QuantizedLinear(loaded.library), Linear(loaded.library, loaded.isa)
    torch.manual_seed(0)
    print(f"{loaded.quantized_isa}, {torch.get_num_threads()} threads")
    few_rows(op, dense, tuple(args.shape), args.few, args.rounds)
    many_rows(op, dense, tuple(args.shape), args.many, args.rounds)
    accuracy(op, tuple(args.shape))


if __name__ == "__main__":
    main()
