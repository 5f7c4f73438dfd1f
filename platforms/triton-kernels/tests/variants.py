"""Counts how many variants of attention would be compiled while a server runs.

A program: `python -m platforms.triton-kernels.tests.variants`.

Each compilation takes seconds, in the middle of a step. Steps are random, like those of a server: prompts of any
length, some batched with decodes, block tables of any width. Nothing is computed: tensors are on torch's `meta` device.
"""

from __future__ import annotations

import importlib
import random
from unittest import mock

import torch

from mvllm_triton import attention

HEADS = {"llama-3.1-8b": (32, 8, 128), "qwen2.5-7b": (28, 4, 128), "gpt-oss": (64, 8, 64)}


def main(num_steps: int = 400) -> None:
    """Prints the number of compiled kernels for each model."""
    compiled = importlib.import_module("platforms.triton-kernels.tests.compiled")
    for name, heads in HEADS.items():
        rng = random.Random(1)
        with (
            compiled.launches() as caught,
            torch.device("meta"),
            mock.patch.object(attention, "processors", lambda _: 132),
        ):
            for _ in range(num_steps):
                _step(rng, *heads)
        kinds = {
            (launch.function.__name__, str((launch.signature, launch.constants, launch.aligned))) for launch in caught
        }
        counts = {
            kernel: sum(kind == kernel for kind, _ in kinds) for kernel in ("paged_attention", "paged_attention_reduce")
        }
        print(name, *counts.values())


def _step(rng: random.Random, heads: int, kv_heads: int, size: int) -> None:
    num_requests = rng.choice((1, rng.randint(1, 256)))
    lengths = [round(2 ** rng.uniform(0, 12)) if rng.random() < 0.02 else 1 for _ in range(num_requests)]
    cache = torch.empty(2, 16, kv_heads, size, dtype=torch.bfloat16)
    tables = (
        torch.zeros(num_requests, rng.randint(1, 600), dtype=torch.int32),
        *(torch.zeros(count, dtype=torch.int32) for count in (num_requests + 1, num_requests)),
    )
    query = torch.empty(sum(lengths), heads, size, dtype=torch.bfloat16)
    longest = max(lengths) + rng.choice((0, rng.randint(0, 8192)))
    attention.paged_attention(
        query, cache, cache, *tables, scale=1.0, max_query_len=max(lengths), max_seq_len=longest
    )  # fmt: skip


if __name__ == "__main__":
    main()
