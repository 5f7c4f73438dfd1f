"""Kernels one by one: their results, and their rates beside torch's own attention and the device's limits.

    numerics             the conformance suite's cases of attention, operations and sampling
    cudnn numerics       cuDNN's attention of long prompts, beside exact attention and the Triton kernels
    decode attention     bytes of keys and values per second, beside a copy's
    prompt attention     operations per second, beside torch's attention on dense tensors
    products             weights' bytes per second at few rows, operations per second at many

Shapes are those of Llama-3.1-8B in bfloat16.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.gpu.bench import ceilings
from tests.gpu.conformance import run_suite
from tests.gpu.result_log import FAILED, MEASURED, NOT_RUN, OK, ResultLog, Row
from tests.gpu.settings import Item, Settings

if TYPE_CHECKING:
    from mvllm.plugin_api import AttentionBackend, BatchLayout, DeviceRuntime

HEADS, KV_HEADS, SIZE = 32, 8, 128
BFLOAT16 = 2  # bytes
NUMERICS = "ATT,OPS,SMP"
DECODES: dict[str, list[int]] = {
    "1 x 8k": [8192],
    "1 x 32k": [32768],
    "16 x 2k": [2048] * 16,
    "64 x 2k": [2048] * 64,
    "256 x 1k": [1024] * 256,
    "1 x 100k and 63 x 1k": [100_000] + [1000] * 63,
}
PROMPTS: dict[str, list[tuple[int, int]]] = {  # (tokens before the step, new tokens) of each request
    "2k": [(0, 2048)],
    "8k": [(0, 8192)],
    "2k after 30k": [(30720, 2048)],
    "4 x 2k": [(0, 2048)] * 4,
}
PRODUCTS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256))
ROWS = (1, 16, 64, 256, 8192)
QUICK_DECODES = {"2 x 40": [40] * 2}
QUICK_PROMPTS = {"30 after 20": [(20, 30)]}


Timer = Callable[[Callable[[], object]], float]
"""Seconds of a call on the device, the time of launching it left out."""


@dataclass(frozen=True)
class Layer:
    """A layer's attention on the device, with a cache of random keys and values."""

    runtime: DeviceRuntime
    backend: AttentionBackend
    kv: Any
    block_size: int
    num_blocks: int


def items(settings: Settings) -> list[Item]:
    """Results first."""
    on_host = f"needs a device: platform {settings.platform} runs on the host" if settings.on_host else ""
    return [
        Item("numerics", 30, 150),
        Item("cudnn numerics", 10, 60, obstacle=on_host),
        Item("decode attention", 5, 60),
        Item("prompt attention", 5, 60),
        Item("products", 5, 60),
    ]


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """See the module."""
    if item == "numerics":
        run_suite("kernels", item, settings, result_log, only="KVL" if settings.quick else NUMERICS)
        return
    if item == "cudnn numerics":
        _cudnn_numerics(item, settings, result_log)
        return
    copied, multiplied = ceilings(settings, result_log)
    from tests.gpu.device import open_device

    with open_device(settings.platform) as runtime:
        timer = device_timer(runtime, settings)
        if item == "products":
            _products(timer, runtime, copied, multiplied, settings, result_log)
        elif item == "decode attention":
            _decodes(timer, runtime, copied, settings, result_log)
        else:
            _prompts(timer, runtime, multiplied, settings, result_log)


def _cudnn_numerics(item: str, settings: Settings, result_log: ResultLog) -> None:
    import importlib

    from tests.gpu.device import open_device

    with open_device(settings.platform) as runtime:
        on_device = importlib.import_module("platforms.torch-gpu.tests.on_device")
        if reasons := on_device.refusals():
            result_log.add(Row("kernels", item, item, NOT_RUN, {}, "; ".join(reasons)))
            return
        for found in on_device.comparisons(runtime):
            figures = {"from_exact": found.from_exact, "from_triton": found.from_triton, "allowed": found.allowed}
            status = OK if found.is_right else FAILED
            result_log.add(Row("kernels", item, found.name, status, figures, "" if found.is_right else str(found)))


def _decodes(timer: Timer, runtime: DeviceRuntime, copied: float, settings: Settings, result_log: ResultLog) -> None:
    found = QUICK_DECODES if settings.quick else DECODES
    layer = open_layer(runtime, settings, max(sum(lengths) + 512 * len(lengths) for lengths in found.values()))
    for name, lengths in found.items():
        call = attention_call(layer, [(length - 1, 1) for length in lengths])
        seconds = timer(call)
        num_bytes = 2 * BFLOAT16 * KV_HEADS * SIZE * sum(lengths)
        figures = {"us": seconds * 1e6, "of_bandwidth": num_bytes / seconds / copied}
        result_log.add(Row("kernels", "decode attention", f"decode attention, {name}", MEASURED, figures))


def _prompts(
    timer: Timer, runtime: DeviceRuntime, multiplied: float, settings: Settings, result_log: ResultLog
) -> None:
    import torch

    found = QUICK_PROMPTS if settings.quick else PROMPTS
    most = max(sum(before + new for before, new in requests) for requests in found.values())
    layer = open_layer(runtime, settings, most + 4096)
    for name, requests in found.items():
        seconds = timer(attention_call(layer, requests))
        operations = prompt_attention_operations(requests)
        figures = {"us": seconds * 1e6, "tflop_s": operations / seconds / 1e12}
        figures["of_matmul_rate"] = operations / seconds / multiplied
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            if len(requests) == 1 and not requests[0][0] and not settings.quick:
                # A device that has no such kernel: the row is without this figure.
                with contextlib.suppress(RuntimeError):
                    other = timer(_torch_attention(torch, runtime, backend, requests[0][1]))
                    figures[f"torch_{backend.partition('_')[0].lower()}_tflop_s"] = operations / other / 1e12
        result_log.add(Row("kernels", "prompt attention", f"prompt attention, {name}", MEASURED, figures))


def _products(
    timer: Timer,
    runtime: DeviceRuntime,
    copied: float,
    multiplied: float,
    settings: Settings,
    result_log: ResultLog,
) -> None:
    import torch

    shapes, counts = (((64, 64),), (1,)) if settings.quick else (PRODUCTS, ROWS)
    for inner, outer in shapes:
        # As many weights as a cache does not hold, so that each product reads its own from memory.
        copies = max(1, int(4e8 / (inner * outer * BFLOAT16)))
        weights = [_random(torch, runtime, outer, inner) for _ in range(1 if settings.quick else copies)]
        linear, prepared = linear_of(settings, weights)
        for rows in counts:
            x = _random(torch, runtime, rows, inner)
            seconds = timer(partial(_next_product, linear, x, itertools.cycle(prepared)))
            floor = max(inner * outer * BFLOAT16 / copied, 2 * inner * outer * rows / multiplied)
            figures = {"us": seconds * 1e6, "of_floor": floor / seconds}
            name = f"product, {rows} x {inner} x {outer}"
            result_log.add(Row("kernels", "products", name, MEASURED, figures))


def device_timer(runtime: DeviceRuntime, settings: Settings, calls: int = 8) -> Timer:
    from mvllm.platform.choose import choose_platform
    from tests.gpu.device import graph_seconds_of

    platform = choose_platform(settings.platform).platform
    compiler = platform.compiler() if platform.capabilities.graphs else None
    return partial(graph_seconds_of, runtime, compiler, calls=calls)


def _next_product(linear: Callable[..., Any], x: Any, weights: Iterator[Any]) -> object:
    return linear(x, next(weights), None)


def linear_of(settings: Settings, weights: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The `linear` operation of the platform's engine, and the weights in the form that it takes."""
    import torch

    from mvllm.ops.registry import OpTable
    from mvllm.platform.choose import choose_platform

    outer, inner = weights[0].shape
    table = OpTable.resolve(choose_platform(settings.platform).platform.ops())
    op = table.get("linear", torch.bfloat16, in_features=inner, out_features=outer, bias=False)
    return op.function, weights if op.prepare is None else [op.prepare(weight) for weight in weights]


def open_layer(runtime: DeviceRuntime, settings: Settings, num_tokens: int) -> Layer:
    """A layer with a cache for so many tokens."""
    from mvllm.platform.choose import choose_platform
    from mvllm.testing.attention_cases import make_spec

    spec = make_spec(HEADS, KV_HEADS, SIZE, "bfloat16")
    backend = choose_platform(settings.platform).platform.attention_backend(spec)
    block_size = backend.kv_layout().block_sizes[0]
    num_blocks = -(-num_tokens // block_size) + 1
    kv = backend.allocate(num_blocks, block_size, runtime.device)
    for tensor in kv if isinstance(kv, tuple | list) else ():
        tensor.normal_()
    return Layer(runtime, backend, kv, block_size, num_blocks)


def attention_call(layer: Layer, requests: Sequence[tuple[int, int]]) -> Callable[[], object]:
    """Attention of a step with these (tokens before, new tokens), as the engine calls it."""
    import numpy as np
    import torch

    from mvllm.testing.attention_cases import CacheHarness, make_layout

    needs = [-(-(before + new) // layer.block_size) for before, new in requests]
    ids = np.random.default_rng(0).permutation(layer.num_blocks).astype(np.int32)
    tables = np.zeros((len(requests), max(needs)), dtype=np.int32)
    for row, need in enumerate(needs):
        tables[row, :need], ids = ids[:need], ids[need:]
    layout: BatchLayout = make_layout(requests, tables, layer.block_size)
    harness = CacheHarness.__new__(CacheHarness)
    harness.backend, harness.runtime = layer.backend, layer.runtime
    metadata = harness.begin_step(layout)
    query = _random(torch, layer.runtime, layout.num_tokens, HEADS * SIZE).view(-1, HEADS, SIZE)
    layer.backend.forward(query, layer.kv, metadata)  # what is measured or compiled once is now
    return lambda: layer.backend.forward(query, layer.kv, metadata)


def prompt_attention_operations(requests: Sequence[tuple[int, int]]) -> float:
    """Operations of attention: a multiply-add is two, for scores and for values."""
    pairs = sum(new * before + new * (new + 1) / 2 for before, new in requests)
    return 4 * HEADS * SIZE * pairs


def _torch_attention(torch: Any, runtime: DeviceRuntime, backend: str, length: int) -> Callable[[], object]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (
        _random(torch, runtime, length, heads * SIZE).view(1, length, heads, SIZE).transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def call() -> object:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    call()
    return call


def _random(torch: Any, runtime: DeviceRuntime, *shape: int) -> Any:
    return runtime.empty(shape, torch.bfloat16).normal_()
