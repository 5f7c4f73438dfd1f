"""GRF: captured steps and compiled functions return the results of eager execution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mvllm.extension_api.testing import torch_dtype
from mvllm.plugin_api import CompileBackend, DeviceRuntime
from mvllm_conformance.markers import clause
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.tensor_assertions import assert_equal


def head_compiler(subject: PlatformUnderTest) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Compiles functions as the engine compiles what follows the model, whose steps may be captured."""
    compiler = subject.platform.compiler()
    if compiler is None:
        pytest.skip("the platform has no CompileBackend, by which the engine captures steps")

    def compile_head(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        found = compiler.compile_head(function)
        if found is None:
            pytest.skip("the CompileBackend leaves compile_head out: the engine calls the function as it is")
        return found

    return compile_head


@clause("GRF-01")
def test_a_replay_reads_the_inputs_anew(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    dtype = torch_dtype(claimed_dtype)
    weight = bound_device.to_device(torch.full((8, 8), 0.5, dtype=dtype))
    step = head_compiler(subject)(lambda x: x @ weight + 1)
    for value in (1.0, 2.0, -3.0):
        found = step(bound_device.to_device(torch.full((4, 8), value, dtype=dtype)))
        expected = torch.full((4, 8), value * 4 + 1, dtype=dtype)
        assert_equal(bound_device.to_host(found).wait(), expected, f"a replay for inputs of {value}")


@clause("GRF-01")
def test_two_captures_do_not_disturb_each_other(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    compile_head = head_compiler(subject)
    double, square = compile_head(lambda x: x * 2), compile_head(lambda x: x * x)
    for value in (3.0, 5.0):
        for rows in (1, 4):
            x = bound_device.to_device(torch.full((rows, 16), value))
            for name, step, wanted in (("second", square, value * value), ("first", double, 2 * value)):
                found = bound_device.to_host(step(x)).wait()
                assert_equal(found, torch.full((rows, 16), wanted), f"{rows} rows of the {name} of two functions")


@clause("GRF-02")
def test_the_memory_of_captures_is_counted(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    step = head_compiler(subject)(lambda x: x * 2 + x * 3)
    x = bound_device.to_device(torch.zeros(8, 1 << 17))
    bound_device.synchronize()
    bound_device.release_cached_memory()
    before = bound_device.memory().used_by_me
    found = step(x)
    bound_device.synchronize()
    assert bound_device.memory().used_by_me >= before and found.shape == x.shape


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


@clause("GRF-03", refusal=True)
def test_without_the_claim_there_is_no_compiler(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    assert subject.platform.compiler() is None
