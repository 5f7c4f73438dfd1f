"""Quantized products of a whole model, compared with bf16 and the machine's limits.

    OMP_NUM_THREADS=2 python tests/perf/quantized_linear.py [--rows 1 16 32 256 2048] [--only int8 int4 q4_k]

Each line is one pass over all matrices of a model (sizes by arguments), layer after layer, in one weight format. Few
rows are bound by reading the weights: the pass reads more layers than any cache holds, and the table gives GB/s of
packed bytes and the rate at which the same threads read memory. Many rows are bound by arithmetic: the table gives
GOP/s (two per multiply-add) and torch's rate of int8 products. All formats run in each round, because the machine's
bandwidth changes from minute to minute; the table shows medians over rounds, and ratios to bf16 of the same rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import run
from tempfile import TemporaryDirectory

import torch

from mvllm.plugin_api import QuantizedWeight
from mvllm.testing.block_quantized_cases import block_quantized_weight
from mvllm_cpu import kernels
from mvllm_cpu.block_quantized_linear import FORMATS, BlockQuantizedLinear
from mvllm_cpu.linear import Linear
from mvllm_cpu.quantized_linear import PackedQuantizedWeight, QuantizedLinear

COLD = 160 << 20
FEW_LAYERS = 2
"""Layers in a pass of many rows: their weights are read once for hundreds of rows."""

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
SCHEMES: dict[str, tuple[int, int | None, bool, bool]] = {  # bits, columns per scale, zero points, int8 activations
    "int8, int8 activations": (8, None, False, True),
    "int8": (8, None, False, False),
    "int8, groups of 128": (8, 128, False, False),
    "int4, int8 activations": (4, 32, True, True),
    "int4, groups of 128": (4, 128, False, False),
    "int4, groups of 32, zeros": (4, 32, True, False),
}


def chosen(name: str, only: Sequence[str] | None) -> bool:
    """Whether a scheme is measured."""
    return not only or name.startswith(tuple(only))


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
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved_seconds(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, all called once per round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            taken = seconds(function)
            if turn:
                times[name].append(taken)
    return times


def weight_of(name: str, shape: tuple[int, int]) -> QuantizedWeight:
    """Random integers in one of the SCHEMES."""
    bits, group_size, zero_points, int8_activations = SCHEMES[name]
    out_features, in_features = shape
    group_size = group_size or in_features
    groups, top = -(-in_features // group_size), 2 ** (bits - 1)
    values = torch.randint(-top, top, shape, dtype=torch.int8)
    zeros = torch.randint(-top, top, (out_features, groups), dtype=torch.int8) if zero_points else None
    scales = torch.randint(1, 9, (out_features, groups)) * 2.0**-10  # the format of int4: small multiples of one number
    return QuantizedWeight(values, scales, zeros, group_size, bits, int8_activations)


def packed_bytes(weight: PackedQuantizedWeight) -> int:
    """Bytes that a product reads."""
    zeros = 0 if weight.zero_points is None else weight.zero_points.nbytes
    return weight.values.nbytes + weight.scales.nbytes + zeros


class Model:
    """All matrices of a model in one weight format.

    Args:
        shapes: (out_features, in_features) of a layer's matrices.
        layers: Number of layers.
        pack: Makes a matrix, given its shape.
        product: Multiplies rows with one.
        size: Bytes of one.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        layers: int,
        pack: Callable[[tuple[int, int]], object],
        product: Callable[[torch.Tensor, object], object],
        size: Callable[[object], int],
    ) -> None:
        self.shapes, self.product = shapes, product
        self.layers = [[pack(shape) for shape in shapes] for _ in range(layers)]
        self.layer_bytes = sum(size(weight) for weight in self.layers[0])

    def run(self, inputs: dict[int, torch.Tensor], layers: int, only: int | None = None) -> None:
        """Multiplies with all matrices of `layers` layers, or one of each."""
        for layer in self.layers[:layers]:
            for i, ((_, in_features), weight) in enumerate(zip(self.shapes, layer, strict=True)):
                if only is None or i == only:
                    self.product(inputs[in_features], weight)


def table(models: dict[str, Model], rows: int, rounds: int, reader: ctypes.CDLL, each: bool) -> None:
    """Prints the lines for one number of rows."""
    first = next(iter(models.values()))
    layers = len(first.layers) if rows <= 64 else min(FEW_LAYERS, len(first.layers))
    inputs = {size: torch.randn(rows, size).bfloat16() for size in {i for _, i in first.shapes}}
    functions: dict[str, Callable[[], object]] = {}
    memory = torch.ones(COLD // 8, dtype=torch.float64)
    functions["read"] = lambda: reader.read_all(memory.data_ptr(), memory.numel())
    if rows > 64:
        m, k, n = 2048, 1024, 4096
        x8, w8 = torch.ones(m, k, dtype=torch.int8), torch.ones(n, k, dtype=torch.int8).t()
        functions["torch bytes"] = lambda: torch._int_mm(x8, w8)
    for name, model in models.items():
        functions[name] = lambda model=model: model.run(inputs, layers)
        if each:
            for i, (o, k) in enumerate(model.shapes):
                functions[f"{name}: {o}x{k}"] = lambda model=model, i=i: model.run(inputs, layers, i)
    times = {name: statistics.median(taken) for name, taken in interleaved_seconds(functions, rounds).items()}
    limit = memory.nbytes / times["read"] / 1e9
    head = f"\n{rows} rows, {layers} layers; memory is read at {limit:.1f} GB/s"
    if rows > 64:
        head += f", torch multiplies bytes at {2 * m * k * n / times['torch bytes'] / 1e9:.0f} GOP/s"
    print(head)
    for name, taken in times.items():
        scheme, _, shape = name.partition(": ")
        if scheme not in models:
            continue
        picked = [s for s in first.shapes if not shape or f"{s[0]}x{s[1]}" == shape]
        work = 2 * rows * sum(o * i for o, i in picked) * layers
        beside = times["bf16" + name[len(scheme) :]] / taken
        line = (
            f"  {name:44} {taken / layers * 1e3:8.3f} ms a layer  {beside:5.2f} x bf16  {work / taken / 1e9:6.0f} GOP/s"
        )
        if not shape:
            rate = models[scheme].layer_bytes * layers / taken / 1e9
            line += f"  {rate:5.1f} GB/s {rate / limit:5.0%} of reading"
        print(line)


def accuracy(op: QuantizedLinear, shape: tuple[int, int]) -> None:
    """Root mean square errors over the product's RMS, against float64."""
    print("\nroot mean square error of the product / root mean square of the product, against float64")
    x = torch.randn(64, shape[1]).bfloat16()
    for name in SCHEMES:
        weight = weight_of(name, shape)
        exact = x.double() @ weight.dequantize().double().T
        size = exact.square().mean().sqrt()
        found = (op.quantized_linear(x, op.pack(weight), None).double() - exact).square().mean().sqrt() / size
        rounded = (exact.bfloat16().double() - exact).square().mean().sqrt() / size
        print(f"  {name:28} {found:.2e}; rounding the exact result to bfloat16 alone gives {rounded:.2e}")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 32, 256, 2048])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="schemes whose name begins so")
    parser.add_argument("--each", action="store_true", help="a line for each matrix as well")
    args = parser.parse_args()
    loaded = kernels.load()
    if loaded.library is None:
        raise SystemExit(f"The kernels are not there: {loaded.reason} {loaded.remedy or ''}")
    op, dense = QuantizedLinear(loaded.library), Linear(loaded.library, loaded.isa)
    torch.manual_seed(0)
    print(f"{loaded.quantized_isa}, {torch.get_num_threads()} threads")
    h, i = args.hidden, args.intermediate
    shapes = [(3 * h, h), (h, h), (2 * i, h), (h, i)]
    plain = {shape: torch.randn(shape).bfloat16() for shape in shapes}
    models = {
        "bf16": Model(
            shapes,
            args.layers,
            lambda shape: dense.pack(plain[shape]),
            lambda x, w: dense.linear(x, w, None),
            lambda w: w.data.nbytes,
        )
    }
    for name in SCHEMES:
        if not chosen(name, args.only):
            continue
        whole = {shape: weight_of(name, shape) for shape in shapes}
        models[name] = Model(
            shapes,
            args.layers,
            lambda shape, whole=whole: op.pack(whole[shape]),
            lambda x, w: op.quantized_linear(x, w, None),
            packed_bytes,
        )
    blocks = BlockQuantizedLinear(loaded.library)
    for name in FORMATS:  # as in GGUF files, with int8 activations
        if not chosen(name, args.only):
            continue
        stored = {(o, k): block_quantized_weight(((name, o),), k, True) for o, k in shapes}
        models[name] = Model(
            shapes,
            args.layers,
            lambda shape, stored=stored: blocks.pack(stored[shape]),
            lambda x, w: blocks.block_quantized_linear(x, w, None),
            lambda w: w.data.nbytes,
        )
    with TemporaryDirectory() as folder:
        reader = compiled_reader(Path(folder))
        for rows in args.rows:
            table(models, rows, args.rounds, reader, args.each)
    accuracy(op, (h, h))


if __name__ == "__main__":
    main()
