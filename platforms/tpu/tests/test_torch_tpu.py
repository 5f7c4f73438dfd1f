"""The runtime of torch_tpu without torch_tpu: the host replaces its device.

test_torch_tpu_on_xlas_cpu_device.py runs it with torch_tpu, if that is installed.
"""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.registry import _BACKENDS, register_backend

from mvllm.plugin_api import PlatformError
from mvllm_tpu import eager_runtime, host_memory, runtimes, xla_devices
from mvllm_tpu.platform import make_platform
from mvllm_tpu.probe import probe
from mvllm_tpu.runtimes.torch_tpu import LIBRARY_VARIABLE
from mvllm_tpu.step_compiler import StepCompiler

CONTEXT = SimpleNamespace(rank=0, seed=3)


class Accelerator:
    """Torch's module of a chip with 100 bytes: 10 in use, a peak of 40. If `broken`, it does not answer."""

    def __init__(self):
        self.broken = False

    def synchronize(self):
        if self.broken:
            raise RuntimeError("the chip is gone\nand here is a long trace")

    def get_memory_info(self):
        return 90, 100

    def memory_allocated(self):
        return 10

    def max_memory_allocated(self):
        return 40


@pytest.fixture
def accelerator(host, monkeypatch):
    """A chip whose memory is the host's."""
    host.add("0x005e")
    host.files("accel0")
    accelerator = Accelerator()
    monkeypatch.setattr(eager_runtime, "_accelerator", lambda: accelerator)
    monkeypatch.setattr(eager_runtime, "_open", lambda on_host: torch.device("cpu"))
    return accelerator


@pytest.mark.parametrize(
    ("there", "chosen"),
    [(("torch_xla", "torch_tpu"), "torch_xla"), (("torch_tpu",), "torch_tpu"), (("torch_xla",), "torch_xla")],
)
def test_torch_tpu_is_chosen_if_torch_xla_is_not_installed(host, installed, there, chosen):
    installed(*there)
    assert runtimes.choose().name == chosen


def test_the_variable_selects_torch_tpu(host, installed, monkeypatch):
    installed("torch_xla", "torch_tpu")
    monkeypatch.setenv(runtimes.VARIABLE, "torch_tpu")
    assert runtimes.choose().name == "torch_tpu"


def test_with_torch_tpu_the_platform_compiles_and_is_not_lazy(host, installed):
    installed("torch_tpu")
    capabilities = make_platform().capabilities
    assert capabilities.compile and capabilities.static_shapes and not capabilities.lazy
    assert isinstance(make_platform().compiler(), StepCompiler)


def test_torch_tpu_has_chips_and_a_host_device_only_from_another_library(host, installed, monkeypatch):
    installed("torch_tpu")
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    found = probe()
    assert not found.available and "no CPU device" in found.reason and "torch-xla" in found.remedy
    monkeypatch.setenv(LIBRARY_VARIABLE, "/there/is/one.so")
    assert probe().available
    monkeypatch.delenv(LIBRARY_VARIABLE)
    monkeypatch.delenv(xla_devices.PJRT_VARIABLE)
    host.add("0x006f")
    host.files("vfio/0")
    found = probe()
    assert found.available and found.reason == "TPU v6e, through torch_tpu"


def test_a_copy_to_the_host_is_unchanged_by_later_writes(accelerator):
    runtime = eager_runtime.EagerRuntime(CONTEXT)
    tensor = runtime.to_device(torch.arange(4))
    copy = runtime.to_host(tensor)
    tensor.zero_()
    assert copy.wait().tolist() == [0, 1, 2, 3]
    assert copy.wait() is copy.wait()


def test_memory_statistics_of_a_chip(accelerator):
    memory = eager_runtime.EagerRuntime(CONTEXT).memory()
    assert (memory.total, memory.free, memory.used_by_me, memory.peak_by_me) == (100, 90, 10, 40)


def test_memory_statistics_on_the_host(accelerator, monkeypatch):
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    memory = eager_runtime.EagerRuntime(CONTEXT).memory()
    assert memory.total == host_memory.total() and 0 < memory.used_by_me <= memory.peak_by_me < memory.total


def test_too_large_tensors_raise_a_memory_error_with_their_size(accelerator):
    runtime = eager_runtime.EagerRuntime(CONTEXT)
    with pytest.raises(MemoryError, match=r"takes 2\.00 GiB"):
        runtime.empty((1 << 29,), torch.float32)
    assert runtime.empty((2, 3), torch.int32).shape == (2, 3)


def test_a_failed_device_gives_a_one_line_error_and_still_shuts_down(accelerator):
    runtime = eager_runtime.EagerRuntime(CONTEXT)
    runtime.health()
    accelerator.broken = True
    with pytest.raises(PlatformError, match=r"does not answer: the chip is gone\.$"):
        runtime.health()
    runtime.shutdown()


def test_a_library_that_opens_no_device_raises_a_platform_error(accelerator, monkeypatch):
    def fail(on_host):
        raise RuntimeError("no PJRT client")

    monkeypatch.setattr(eager_runtime, "_open", fail)
    with pytest.raises(PlatformError, match=r"opens no device for rank 0: no PJRT client.*doctor"):
        eager_runtime.EagerRuntime(CONTEXT)


@pytest.fixture
def backend():
    """Registers a torch.compile backend with torch_tpu's name; the list of its compiled programs."""
    made = []

    def compile_nothing(module, inputs):
        made.append([tuple(each.shape) for each in inputs])
        return module.forward

    register_backend(compile_nothing, name="tpu")
    yield made
    _BACKENDS.pop("tpu", None)
    torch._dynamo.reset()


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters,
    reason=f"torch {torch.__version__} is older than what torch_tpu runs with: its compile has no recompile_limit",
)
def test_a_step_is_compiled_once_for_each_of_many_shapes(backend):
    def step(tokens, cache):
        cache[: len(tokens)] += tokens
        return cache.sum() + tokens.sum()

    compiled = StepCompiler().compile(step, dynamic=True)
    for _ in range(2):
        for size in range(1, 14):  # torch's default limit is eight
            tokens, cache = torch.ones(size), torch.zeros(16)
            assert compiled(tokens, cache) == 2 * size
            assert cache.sum() == size, "the cache is written in place"
    assert len(backend) == 13


def test_the_cache_key_contains_the_version(monkeypatch):
    before = StepCompiler().cache_key()
    monkeypatch.setattr("mvllm_tpu.step_compiler.version", lambda name: "9.9")
    assert StepCompiler().cache_key() != before


def test_workers_get_no_additional_variables(host, installed):
    installed("torch_tpu")
    assert runtimes.choose().variables(xla_devices.find(environ=os.environ)) == {}
