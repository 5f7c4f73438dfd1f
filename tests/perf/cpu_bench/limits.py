"""The machine's limits: the least data and operations of a workload, and the highest possible rates.

The bound has two phases: prompts, then tokens one at a time. The time of a phase is the larger of two: bytes divided by
the read bandwidth, and operations divided by the rate of matrix products. Both rates are measured before and after
every run.

    prompts   weights once                     2 operations per weight and token, the head only for each prompt's end
    tokens    weights + head + KV, every step  the same per token, with the head

Attention operations count only the positions that a token attends to; keys and values take 2 bytes each. A shared
prefix is computed once, and read once per step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.perf.cpu_bench.workloads import Workload

KV_BYTES = 2  # per element


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a dense decoder that the bound is computed from.

    Attributes:
        layers: Weights of the matrices in all layers.
        head: Weights of the LM head.
        kv: Elements of keys and values per token, over all layers.
        pair: Multiply-adds per pair of a query and a key, over all layers.
        vocab: Number of token ids.
    """

    layers: int
    head: int
    kv: int
    pair: int
    vocab: int

    @classmethod
    def of(cls, folder: Path) -> ModelSize:
        """Reads the sizes from `config.json` in `folder`."""
        config = json.loads((folder / "config.json").read_text())
        hidden, heads, depth = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
        head_size = config.get("head_dim") or hidden // heads
        q, kv = heads * head_size, (config.get("num_key_value_heads") or heads) * head_size
        layer = hidden * (2 * q + 2 * kv) + 3 * hidden * config["intermediate_size"]
        return cls(
            layers=depth * layer,
            head=hidden * config["vocab_size"],
            kv=2 * kv * depth,
            pair=2 * q * depth,
            vocab=config["vocab_size"],
        )


@dataclass(frozen=True)
class WeightFormat:
    """Bits per weight, scales included, in the layers and in the head; int8 products where `int8_products`."""

    layers: float
    head: float
    int8_products: bool = False


BF16 = WeightFormat(16, 16)


@dataclass(frozen=True)
class Rates:
    """Measured rates of the machine: read GB/s, and 10^9 operations per second of matrix products.

    Attributes:
        read: Read bandwidth of memory far larger than any cache, all threads together; None if it is not known.
        bf16, int8: Rate of a product of 2048 x 1024 by 1024 x 4096.
    """

    read: float | None
    bf16: float
    int8: float


@dataclass(frozen=True)
class Work:
    """The least work of one phase.

    Attributes:
        bytes: Bytes to read.
        float_ops, int8_ops: Operations (a multiply-add is two) by the kind of product that they may run in.
    """

    bytes: float
    float_ops: float
    int8_ops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.float_ops + other.float_ops, self.int8_ops + other.int8_ops)

    def read_seconds(self, rates: Rates) -> float:
        """At the read bandwidth; 0 where it is not known."""
        return self.bytes / (rates.read * 1e9) if rates.read else 0.0

    def compute_seconds(self, rates: Rates) -> float:
        """At the rate of matrix products."""
        return (self.float_ops / rates.bf16 + self.int8_ops / rates.int8) / 1e9


def phases(workload: Workload, size: ModelSize, weights: WeightFormat) -> tuple[Work, Work]:
    """The least work of the prompts, and of the tokens after each prompt's first."""
    n = workload.requests
    prompt_tokens = workload.shared + n * workload.own
    # Token i of a prompt attends to i + 1 positions; a shared prefix is computed once.
    pairs = _triangle(workload.shared) + n * (_triangle(workload.prompt) - _triangle(workload.shared))
    layer_bytes, head_bytes = size.layers * weights.layers / 8, size.head * weights.head / 8
    prompts = _work(size, weights, layer_bytes + head_bytes, prompt_tokens, n, pairs)

    steps = workload.output - 1
    pairs = n * sum(workload.prompt + 1 + step for step in range(steps))
    read = sum(workload.shared + n * (workload.own + step) for step in range(steps)) * size.kv * KV_BYTES
    tokens = _work(size, weights, steps * (layer_bytes + head_bytes) + read, n * steps, n * steps, pairs)
    return prompts, tokens


def floor_seconds(workload: Workload, size: ModelSize, weights: WeightFormat, rates: Rates) -> float:
    """The least seconds of the workload: in each phase, the larger of the read time and the compute time."""
    return sum(max(p.read_seconds(rates), p.compute_seconds(rates)) for p in phases(workload, size, weights))


def _work(size: ModelSize, weights: WeightFormat, num_bytes: float, tokens: int, logits: int, pairs: int) -> Work:
    layer_ops, head_ops, pair_ops = 2 * size.layers * tokens, 2 * size.head * logits, 2 * size.pair * pairs
    if not weights.int8_products:
        return Work(num_bytes, layer_ops + head_ops + pair_ops, 0)
    if weights.head > 8.5:
        return Work(num_bytes, head_ops + pair_ops, layer_ops)
    return Work(num_bytes, pair_ops, layer_ops + head_ops)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
