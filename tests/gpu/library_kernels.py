"""Kernels that vLLM would call, of FlashInfer and torch, beside the platform's, on the same tensors.

`theirs_to_ours` is how many times as long theirs takes. Shapes are those of kernels.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.gpu import kernels
from tests.gpu.result_log import MEASURED, NOT_RUN, ResultLog, Row
from tests.gpu.settings import Item, Settings

if TYPE_CHECKING:
    from mvllm.plugin_api import DeviceRuntime

LIBRARIES = ("flashinfer", "flash_attn", "varlen_attn", "cudnn")
ATTENTION: dict[str, list[tuple[int, int]]] = {
    "decode, 1 x 8k": [(8191, 1)],
    "decode, 64 x 2k": [(2047, 1)] * 64,
    "prompt of 8k": [(0, 8192)],
    "2k after 30k": [(30720, 2048)],
}
QUICK_ATTENTION = {"decode, 2 x 40": [(39, 1)] * 2, "prompt of 30": [(0, 30)]}
PRODUCTS = ((4096, 6144), (14336, 4096))
ROWS = (1, 16, 64)
SAMPLED = (1, 64, 256)  # rows
VOCABULARY = 151936


def items(settings: Settings) -> list[Item]:
    """Attention, products and sampling."""
    obstacle = f"needs a device: platform {settings.platform} runs on the host" if settings.on_host else ""
    return [Item(name, 10, 60, obstacle=obstacle) for name in ("attention", "products", "sampling")]


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """See the module."""
    from tests.gpu.device import open_device

    with open_device(settings.platform) as runtime:
        timer = kernels.device_timer(runtime, settings)
        {"attention": _attention, "products": _products, "sampling": _sampling}[item](
            timer, runtime, settings, result_log
        )


def _attention(timer: kernels.Timer, runtime: DeviceRuntime, settings: Settings, result_log: ResultLog) -> None:
    """The same cache and step with the Triton kernels and with each installed library."""
    from mvllm.testing.attention_cases import make_spec
    from mvllm_torch_gpu.attention_libraries import libraries_for

    spec = make_spec(kernels.HEADS, kernels.KV_HEADS, kernels.SIZE, "bfloat16")
    steps = QUICK_ATTENTION if settings.quick else ATTENTION
    most = max(sum(before + new + 512 for before, new in requests) for requests in steps.values())
    ours: dict[str, float] = {}
    for choice in ("triton", *LIBRARIES):
        reasons = libraries_for(spec, (choice,))[1]
        if reasons:
            note = "; ".join(reasons)
            result_log.add(Row("library_kernels", "attention", f"attention, {choice}", NOT_RUN, note=note))
            continue
        with _chosen(choice, settings):
            layer = kernels.open_layer(runtime, settings, most)
            found = {name: timer(kernels.attention_call(layer, requests)) for name, requests in steps.items()}
        ours = ours or found
        for name, seconds in found.items():
            figures = {"us": seconds * 1e6, "theirs_to_ours": seconds / ours[name]}
            result_log.add(Row("library_kernels", "attention", f"{name}, {choice}", MEASURED, figures))


def _products(timer: kernels.Timer, runtime: DeviceRuntime, settings: Settings, result_log: ResultLog) -> None:
    """The platform's linear operation, and torch's."""
    import torch

    for inner, outer in ((64, 64),) if settings.quick else PRODUCTS:
        copies = 1 if settings.quick else max(1, int(4e8 / (inner * outer * kernels.BFLOAT16)))
        weights = [_random(torch, runtime, outer, inner) for _ in range(copies)]
        linear, prepared = kernels.linear_of(settings, weights)
        for rows in (1,) if settings.quick else ROWS:
            x = _random(torch, runtime, rows, inner)
            mine = timer(partial(_next_product, linear, x, itertools.cycle(prepared)))
            theirs = timer(partial(_next_product, torch.nn.functional.linear, x, itertools.cycle(weights)))
            figures = {"us": mine * 1e6, "torch_us": theirs * 1e6, "theirs_to_ours": theirs / mine}
            name = f"product, {rows} x {inner} x {outer}"
            result_log.add(Row("library_kernels", "products", name, MEASURED, figures))


def _sampling(timer: kernels.Timer, runtime: DeviceRuntime, settings: Settings, result_log: ResultLog) -> None:
    """top-k 50 and top-p 0.9: the Triton kernels, FlashInfer's (as vLLM calls them), and torch's operations."""
    import torch

    from mvllm_triton.sampling import sample

    vocabulary = 320 if settings.quick else VOCABULARY
    for rows in (2,) if settings.quick else SAMPLED:
        logits = runtime.empty((rows, vocabulary), torch.float32).normal_(0, 3)
        ones = runtime.empty((rows,), torch.float32).fill_(1.0)
        gap, top_p, draws = torch.full_like(ones, float("-inf")), ones * 0.9, ones * 0.37
        top_k = runtime.empty((rows,), torch.int32).fill_(50)
        calls: dict[str, Callable[[], object]] = {
            "ours": partial(sample, logits, ones, gap, top_k, top_p, draws, draws),
            "torch": partial(_torch_sample, torch, logits, 50, 0.9),
        }
        if importlib.util.find_spec("flashinfer") is not None:
            sampling: Any = importlib.import_module("flashinfer.sampling")
            calls["flashinfer"] = partial(sampling.top_k_top_p_sampling_from_logits, logits, top_k, top_p)
        seconds = {name: timer(call) for name, call in calls.items()}
        figures = {f"{name}_us": value * 1e6 for name, value in seconds.items()}
        others = {f"{name}_to_ours": seconds[name] / seconds["ours"] for name in seconds if name != "ours"}
        note = "" if "flashinfer" in calls else "FlashInfer is not installed"
        result_log.add(Row("library_kernels", "sampling", f"sampling, {rows} rows", MEASURED, figures | others, note))


def _torch_sample(torch: Any, logits: Any, top_k: int, top_p: float) -> Any:
    values, ids = logits.topk(top_k)
    shares = values.softmax(dim=-1)
    shares = shares.masked_fill(shares.cumsum(dim=-1) - shares >= top_p, 0.0)
    # multinomial without its check, for which the host waits
    return ids.gather(1, (shares / torch.empty_like(shares).exponential_()).argmax(dim=-1, keepdim=True))


def _random(torch: Any, runtime: DeviceRuntime, *shape: int) -> Any:
    return runtime.empty(shape, torch.bfloat16).normal_()


def _next_product(linear: Callable[..., Any], x: Any, weights: Iterator[Any]) -> object:
    return linear(x, next(weights), None)


@contextlib.contextmanager
def _chosen(choice: str, settings: Settings) -> Iterator[None]:
    variable = f"MVLLM_{'cuda' if settings.on_host else settings.platform}_ATTENTION".upper()
    before = os.environ.get(variable)
    os.environ[variable] = choice
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
