"""GRF: captured steps and compiled functions return the results of eager execution."""

from __future__ import annotations

import torch

from mvllm.extension_api.testing import torch_dtype
from mvllm.plugin_api import CompileBackend, DeviceRuntime, GraphBackend
from mvllm_conformance.markers import clause
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.tensor_assertions import assert_equal


def graphs_of(subject: PlatformUnderTest, runtime: DeviceRuntime) -> GraphBackend:
    graphs = subject.platform.graphs(runtime.device)
    assert isinstance(graphs, GraphBackend), "graphs is claimed, so Platform.graphs must return a GraphBackend"
    return graphs


@clause("GRF-01")
def test_a_replay_reads_the_inputs_anew_and_leaves_results_in_place(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    graphs = graphs_of(subject, bound_device)
    dtype = torch_dtype(claimed_dtype)
    x = bound_device.to_device(torch.ones(4, 8, dtype=dtype))
    weight = bound_device.to_device(torch.full((8, 8), 0.5, dtype=dtype))
    out = bound_device.to_device(torch.zeros(4, 8, dtype=dtype))

    def step() -> None:
        out.copy_(x @ weight + 1)

    step()  # libraries allocate workspaces before the capture
    bound_device.synchronize()
    replay = graphs.capture(step)
    for value in (1.0, 2.0, -3.0):
        x.fill_(value)
        out.zero_()
        replay()
        bound_device.synchronize()
        expected = torch.full((4, 8), value * 4 + 1, dtype=dtype)
        assert_equal(bound_device.to_host(out).wait(), expected, f"a replay for inputs of {value}")


@clause("GRF-01")
def test_two_captures_do_not_disturb_each_other(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    graphs = graphs_of(subject, bound_device)
    x = bound_device.to_device(torch.zeros(16))
    doubled, squared = bound_device.to_device(torch.zeros(16)), bound_device.to_device(torch.zeros(16))
    double = graphs.capture(lambda: doubled.copy_(x * 2))
    square = graphs.capture(lambda: squared.copy_(x * x))
    for value in (3.0, 5.0):
        x.fill_(value)
        square()
        double()
        bound_device.synchronize()
        for name, out, wanted in (("first", doubled, 2 * value), ("second", squared, value * value)):
            found = bound_device.to_host(out).wait()
            assert_equal(found, torch.full((16,), wanted), f"a replay of the {name} of two captures")


@clause("GRF-02")
def test_captured_graphs_are_counted(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    graphs = graphs_of(subject, bound_device)
    before = graphs.memory_bytes()
    x = bound_device.to_device(torch.zeros(1 << 20))
    held = graphs.capture(lambda: x.mul_(2).add_(x * 3))
    assert graphs.memory_bytes() >= before >= 0
    held()


@clause("GRF-03")
def test_a_compiled_function_gives_what_the_function_gives(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    compiler = subject.platform.compiler()
    assert isinstance(compiler, CompileBackend), "compile is claimed, so Platform.compiler must return a CompileBackend"

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * x + 1

    for dynamic in (False, True):
        compiled = compiler.compile(function, dynamic=dynamic)
        for size in (4, 9) if dynamic else (4, 4):
            host = torch.linspace(-2, 2, size).to(torch_dtype(claimed_dtype))
            found = bound_device.to_host(compiled(bound_device.to_device(host))).wait()
            torch.testing.assert_close(found, function(host), rtol=2e-2, atol=2e-2)
    key = compiler.cache_key()
    again = subject.platform.compiler()
    assert key and again is not None and again.cache_key() == key


@clause("GRF-01", "GRF-02", refusal=True)
def test_without_the_claim_there_are_no_graphs(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    assert subject.platform.graphs(bound_device.device) is None


@clause("GRF-03", refusal=True)
def test_without_the_claim_there_is_no_compiler(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    assert subject.platform.compiler() is None
