"""The runtime behind torch_tpu, as far as it can be examined without it: the host stands in for its device.

test_torch_tpu_on_xlas_cpu_device.py runs it for real, where it is installed.
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
    """Torch's view of a chip: 10 bytes held of 100, 40 at most; `broken` makes it not answer."""

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
    """A chip, for which the host's memory stands in."""
    host.add("0x005e")
    host.files("accel0")
    stand_in = Accelerator()
    monkeypatch.setattr(eager_runtime, "_accelerator", lambda: stand_in)
    monkeypatch.setattr(eager_runtime, "_open", lambda on_host: torch.device("cpu"))
    return stand_in


@pytest.mark.parametrize(
    ("there", "chosen"),
    [(("torch_xla", "torch_tpu"), "torch_xla"), (("torch_tpu",), "torch_tpu"), (("torch_xla",), "torch_xla")],
)
def test_it_is_taken_where_its_predecessor_is_not_installed(host, installed, there, chosen):
    installed(*there)
    assert runtimes.choose().name == chosen


def test_the_variable_takes_it_all_the_same(host, installed, monkeypatch):
    installed("torch_xla", "torch_tpu")
    monkeypatch.setenv(runtimes.VARIABLE, "torch_tpu")
    assert runtimes.choose().name == "torch_tpu"


def test_the_platform_then_compiles_and_is_not_lazy(host, installed):
    installed("torch_tpu")
    capabilities = make_platform().capabilities
    assert capabilities.compile and capabilities.static_shapes and not capabilities.lazy
    assert isinstance(make_platform().compiler(), StepCompiler)


def test_it_runs_on_chips_and_has_no_device_on_the_host_unless_a_library_offers_one(host, installed, monkeypatch):
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


def test_a_copy_to_the_host_holds_what_was_there_when_it_was_asked_for(accelerator):
    runtime = eager_runtime.EagerRuntime(CONTEXT)
    tensor = runtime.to_device(torch.arange(4))
    copy = runtime.to_host(tensor)
    tensor.zero_()
    assert copy.wait().tolist() == [0, 1, 2, 3]
    assert copy.wait() is copy.wait()


def test_memory_is_the_chips(accelerator):
    memory = eager_runtime.EagerRuntime(CONTEXT).memory()
    assert (memory.total, memory.free, memory.used_by_me, memory.peak_by_me) == (100, 90, 10, 40)


def test_memory_on_the_host_is_the_hosts(accelerator, monkeypatch):
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    memory = eager_runtime.EagerRuntime(CONTEXT).memory()
    assert memory.total == host_memory.total() and 0 < memory.used_by_me <= memory.peak_by_me < memory.total


def test_what_does_not_fit_is_a_memory_error_that_says_how_much(accelerator):
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


def test_a_library_that_opens_nothing_is_an_error_of_the_platform(accelerator, monkeypatch):
    def fail(on_host):
        raise RuntimeError("no PJRT client")

    monkeypatch.setattr(eager_runtime, "_open", fail)
    with pytest.raises(PlatformError, match=r"opens no device for rank 0: no PJRT client.*doctor"):
        eager_runtime.EagerRuntime(CONTEXT)


@pytest.fixture
def backend():
    """A compiler for torch.compile that bears torch_tpu's name, and counts the programs that it makes."""
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
def test_a_step_is_a_program_for_each_of_many_shapes_and_none_is_made_twice(backend):
    def step(tokens, cache):
        cache[: len(tokens)] += tokens
        return cache.sum() + tokens.sum()

    compiled = StepCompiler().compile(step, dynamic=True)
    for _ in range(2):
        for size in range(1, 14):  # torch itself gives up after eight
            tokens, cache = torch.ones(size), torch.zeros(16)
            assert compiled(tokens, cache) == 2 * size
            assert cache.sum() == size, "the cache is written in place"
    assert len(backend) == 13


def test_programs_are_not_reused_by_another_version(monkeypatch):
    before = StepCompiler().cache_key()
    monkeypatch.setattr("mvllm_tpu.step_compiler.version", lambda name: "9.9")
    assert StepCompiler().cache_key() != before


def test_workers_get_no_variables_but_those_of_their_parent(host, installed):
    installed("torch_tpu")
    assert runtimes.choose().variables(xla_devices.find(environ=os.environ)) == {}
