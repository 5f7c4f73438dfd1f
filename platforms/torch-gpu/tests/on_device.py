"""Checks cuDNN's attention of long prompts on a device, against exact attention and against the Triton kernels.

    python -m platforms.torch-gpu.tests.on_device [PLATFORM]

PLATFORM is by default `cuda`. `--host` runs small cases on the host instead, with Triton's interpreter and torch's
operation of cudnn_operation.py.

A step has decodes, which the Triton kernels compute, and prompts of at least 2,048 tokens after none or many others.
Queries are views of a fused projection. Scores have a standard deviation of 4, so that few keys have most of the
weight: with nearly equal weights every result would be close to 0, and so would be every error.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import torch

from mvllm.plugin_api import AttentionSpec, DeviceRuntime, WorkerContext
from mvllm.testing.attention_cases import Case, expected, make_case, make_spec, run, tolerance

HEADS = {1: (2, 2), 4: (4, 1), 8: (8, 1)}
"""Numbers of heads by how many query heads share a key/value head."""
DECODES = [(7, 1), (5000, 1)]
PROMPTS: dict[str, list[tuple[int, int]]] = {
    "2048": [(0, 2048)],
    "2100": [(0, 2100)],
    "2048 after 30000": [(30_000, 2048)],
    "2048 after 30720": [(30_720, 2048)],
    "2048 and 3000 after 1500": [(0, 2048), (1500, 3000)],
}
SMALL_PROMPTS: dict[str, list[tuple[int, int]]] = {"64": [(0, 64)], "75 after 137": [(137, 75)]}
HOST_SIZES = {"LEAST_TOKENS": 64, "ROW_STEP": 32, "CONTEXT_STEP": 128}
"""Constants of cudnn_attention on the host, where every token takes Triton's interpreter long."""


@dataclass(frozen=True)
class Comparison:
    """Largest differences of a step's results.

    Attributes:
        name: The step.
        from_exact: From exact attention.
        from_triton: From the Triton kernels.
        allowed: Of both.
        computed: Prompts that cuDNN has computed, of `prompts`; others fell back to the Triton kernels.
    """

    name: str
    from_exact: float
    from_triton: float
    allowed: float
    computed: int
    prompts: int

    @property
    def is_right(self) -> bool:
        return max(self.from_exact, self.from_triton) <= self.allowed and self.computed == self.prompts

    def __str__(self) -> str:
        return (
            f"{self.name}: off by {self.from_exact:.2g} from exact attention and by {self.from_triton:.2g} from the "
            f"Triton kernels, allowed {self.allowed:.2g}; cuDNN computed {self.computed} of {self.prompts} prompts"
        )


def refusals() -> list[str]:
    """Why cuDNN cannot be used here; empty if it can."""
    try:
        from mvllm_torch_gpu.cudnn_attention import CudnnAttention
    except ImportError as e:
        return [f"its module cannot be imported: {e}"]
    return CudnnAttention.refusals(torch, make_spec(dtype="bfloat16"))


def comparisons(runtime: DeviceRuntime, *, small: bool = False) -> Iterator[Comparison]:
    """Runs every step with cuDNN and with the Triton kernels."""
    dtypes = ("bfloat16",) if small else ("bfloat16", "float16")
    for dtype in dtypes:
        for shared_by, (num_heads, num_kv_heads) in HEADS.items():
            for name, prompts in (SMALL_PROMPTS if small else PROMPTS).items():
                size = 64 if shared_by == 4 else 128
                spec = make_spec(num_heads, num_kv_heads, size, dtype, scale=4 / size**0.5)
                what = f"{dtype}, {shared_by} heads share a key, prompts of {name}"
                yield _compare(runtime, spec, what, DECODES[: 1 if small else 2], prompts)


def _compare(
    runtime: DeviceRuntime,
    spec: AttentionSpec,
    name: str,
    decodes: Sequence[tuple[int, int]],
    prompts: Sequence[tuple[int, int]],
) -> Comparison:
    from mvllm_torch_gpu import cudnn_attention
    from mvllm_torch_gpu.attention import TritonAttention
    from mvllm_torch_gpu.autotuned_attention import AutotunedAttention

    case = make_case(spec, [*decodes, *prompts], block_size=16, padding=3)
    computed, dense_attention = 0, cudnn_attention.dense_attention

    def counted(*args, **options):
        nonlocal computed
        found = dense_attention(*args, **options)
        computed += options["causal"]  # one such call for each prompt
        return found

    with mock.patch.object(cudnn_attention, "dense_attention", counted):
        found = run(AutotunedAttention(spec, [cudnn_attention.CudnnAttention(torch, spec)], forced=True), runtime, case)
    triton = run(TritonAttention(spec), runtime, case)
    real = slice(case.num_real_tokens)
    return Comparison(
        name,
        from_exact=_difference(found[real], exact_on(runtime.device, case)),
        from_triton=_difference(found[real], triton[real]),
        allowed=tolerance(spec.dtype, spec.kv_dtype),
        computed=computed,
        prompts=len(prompts),
    )


def exact_on(device: torch.device, case: Case) -> torch.Tensor:
    """`expected`, computed by a device with torch's operations; the result is on the host."""
    moved = {name: [x.to(device) for x in getattr(case, name)] for name in ("keys", "values")}
    with torch.device(device):
        return expected(dataclasses.replace(case, query=case.query.to(device), **moved)).cpu()


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference; infinite if a result is not finite."""
    difference = (found.double() - wanted.double()).abs()
    return float(torch.where(difference.isfinite(), difference, torch.inf).max())


def on_host(stack: ExitStack) -> DeviceRuntime:
    """Prepares the host in place of a device, with prompts of 64 tokens as long ones."""
    importlib.import_module("platforms.torch-gpu.tests.interpreted")
    operation = importlib.import_module("platforms.torch-gpu.tests.cudnn_operation")
    from mvllm_cpu.runtime import CPURuntime
    from mvllm_torch_gpu import cudnn_attention

    for name, value in HOST_SIZES.items():
        stack.enter_context(mock.patch.object(cudnn_attention, name, value))
    stack.enter_context(operation.on_the_host())
    return CPURuntime(WorkerContext())


def main(arguments: Sequence[str]) -> int:
    """Prints the comparisons. Returns the exit status: 0 if all results are right."""
    host = "--host" in arguments
    with ExitStack() as stack:
        if host:
            runtime = on_host(stack)
        else:
            open_device = importlib.import_module("tests.gpu.device").open_device
            runtime = stack.enter_context(open_device(arguments[0] if arguments else "cuda"))
            if reasons := refusals():
                print(f"not run: {'; '.join(reasons)}")
                return 1
        made = []
        for comparison in comparisons(runtime, small=host):
            print("right" if comparison.is_right else "WRONG", comparison, flush=True)
            made.append(comparison.is_right)
    print(f"{sum(made)} of {len(made)} steps are right")
    return 0 if all(made) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
