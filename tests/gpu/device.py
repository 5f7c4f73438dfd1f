"""Opens the device through its platform, and times work on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mvllm.platform.checked_calls import call_checked
from mvllm.platform.choose import choose_platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.plugin_api import CompileBackend, DeviceRuntime, WorkerContext


@contextmanager
def open_device(platform: str) -> Iterator[DeviceRuntime]:
    """The first device of a platform, bound to this process."""
    chosen = choose_platform(platform).platform
    with enter_phase(Phase.WORKER):
        runtime: DeviceRuntime = call_checked(chosen, "init_device", WorkerContext(), returns=DeviceRuntime)
        try:
            yield runtime
        finally:
            runtime.shutdown()


def seconds_of(runtime: DeviceRuntime, work: Callable[[], object], *, calls: int, rounds: int = 5) -> float:
    """Seconds of one call of `work`: the median over rounds, each of `calls` that are submitted one after the other."""
    work()
    found = []
    for _ in range(rounds):
        runtime.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        runtime.synchronize()
        found.append((time.perf_counter() - begin) / calls)
    return statistics.median(found)


def graph_seconds_of(
    runtime: DeviceRuntime, compiler: CompileBackend | None, work: Callable[[], object], *, calls: int
) -> float:
    """As `seconds_of`, with the time of launching the work left out where the platform captures steps."""
    import torch

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(calls):
            work()
        return x + 1  # the engine's functions take a tensor of rows, and return one

    captured = None if compiler is None else compiler.compile_head(step)
    if captured is None:
        return seconds_of(runtime, work, calls=calls)
    work()
    one_row = runtime.empty((1, 1), torch.float32)
    return seconds_of(runtime, lambda: captured(one_row), calls=1) / calls


def copy_bandwidth(runtime: DeviceRuntime, num_bytes: int, calls: int = 10) -> float:
    """Bytes per second, read and written, of a copy within the device."""
    import torch

    source, target = (runtime.empty((num_bytes,), torch.uint8) for _ in range(2))
    source.zero_()
    return 2 * num_bytes / seconds_of(runtime, lambda: target.copy_(source), calls=calls)


def read_bandwidth(runtime: DeviceRuntime, num_bytes: int, calls: int = 10) -> float:
    """Bytes per second that are only read: the faster of two reductions of float32, to a sum and to a maximum."""
    import torch

    source = runtime.empty((num_bytes // 4,), torch.float32)
    source.zero_()
    return num_bytes / min(seconds_of(runtime, reduce, calls=calls) for reduce in (source.sum, source.amax))


def matmul_rate(runtime: DeviceRuntime, size: int, calls: int = 10) -> float:
    """Operations per second (a multiply-add is two) of a product of two bfloat16 matrices of random numbers."""
    import torch

    a, b, c = (runtime.empty((size, size), torch.bfloat16) for _ in range(3))
    a.normal_()
    b.normal_()
    return 2 * size**3 / seconds_of(runtime, lambda: torch.mm(a, b, out=c), calls=calls)
