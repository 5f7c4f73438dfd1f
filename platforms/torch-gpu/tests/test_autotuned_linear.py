"""Which way products of few rows are computed, and that both ways give the product."""

from __future__ import annotations

import contextlib
import functools
import importlib

import pytest
import torch

importlib.import_module("platforms.torch-gpu.tests.interpreted")  # skips without Triton

from mvllm.plugin_api import ConfigError  # noqa: E402
from mvllm_torch_gpu import autotuned_linear  # noqa: E402
from mvllm_torch_gpu.autotuned_linear import MEASURED, TORCH, TRITON, AutotunedLinear, device_seconds  # noqa: E402
from mvllm_torch_gpu.settings import Settings  # noqa: E402


@pytest.fixture
def calls(monkeypatch):
    """Names of the ways that compute products, in the order of the calls."""
    found = []

    def recording(name, original):
        @functools.wraps(original)
        def call(*args):
            found.append(name)
            return original(*args)

        return call

    for name in ("skinny_gemm", "skinny_gemm_silu_and_mul"):
        monkeypatch.setattr(autotuned_linear, name, recording(TRITON, getattr(autotuned_linear, name)))
    monkeypatch.setattr(autotuned_linear.F, "linear", recording(TORCH, torch.nn.functional.linear))
    monkeypatch.setattr(
        autotuned_linear, "LINEAR_WAYS", {TORCH: autotuned_linear.F.linear, TRITON: autotuned_linear.skinny_gemm}
    )
    gated = {TORCH: autotuned_linear._separate, TRITON: autotuned_linear.skinny_gemm_silu_and_mul}
    monkeypatch.setattr(autotuned_linear, "GATED_WAYS", gated)
    return found


def make(num_rows=2, out_features=1024, dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, 16, dtype=dtype), torch.randn(out_features, 16, dtype=dtype)
    return x, weight, torch.randn(out_features, dtype=dtype)


def clock_with_order(*names):
    """A clock for which the ways in `names` are faster if they come earlier; it computes every call."""

    def clock(calls):
        for call in calls:
            call()
        return float(names.index(TRITON if calls[0].func.__name__.startswith("skinny_gemm") else TORCH))

    return clock


@pytest.mark.parametrize("faster", [TORCH, TRITON])
def test_the_faster_way_is_chosen_once_for_each_kind(faster, calls):
    slower = {TORCH: TRITON, TRITON: TORCH}[faster]
    linear = AutotunedLinear(clock=clock_with_order(faster, slower))
    x, weight, bias = make()
    found = linear.linear(x, weight, bias)
    assert calls == [TORCH, TRITON, faster]
    torch.testing.assert_close(found.float(), x.float() @ weight.float().T + bias.float(), rtol=1e-2, atol=1e-2)
    calls.clear()
    linear.linear(x, weight + 1, bias)
    assert calls == [faster]
    calls.clear()
    linear.linear(make(3)[0], weight, bias)
    assert calls == [TORCH, TRITON, faster], "3 rows are another kind than 2"
    calls.clear()
    linear.linear(make(4)[0], weight, bias)
    assert calls == [faster], "4 rows are of the kind of 3"


@pytest.mark.parametrize("faster", [TORCH, TRITON])
def test_gated_products_are_measured_by_themselves(faster, calls):
    slower = {TORCH: TRITON, TRITON: TORCH}[faster]
    linear = AutotunedLinear(clock=clock_with_order(faster, slower))
    x, weight, bias = make()
    plain = linear.linear(x, weight, bias)
    calls.clear()
    found = linear.linear_silu_and_mul(x, weight, bias)
    assert calls == [TORCH, TRITON, faster]
    gate, up = plain.float().chunk(2, dim=1)
    torch.testing.assert_close(found.float(), torch.nn.functional.silu(gate) * up, rtol=3e-2, atol=3e-2)


def test_products_that_stay_with_torch(calls):
    def clock(calls):
        raise AssertionError("not timed")

    linear = AutotunedLinear(clock=clock)
    linear.linear(*make(65))
    linear.linear(*make(dtype=torch.float32))
    linear.linear(*make(out_features=512))
    assert calls == [TORCH] * 3


def test_without_a_device_to_time_on_torch_computes_and_nothing_is_stored(calls):
    for linear in (AutotunedLinear(), AutotunedLinear(clock=lambda calls: None)):
        linear.linear(*make())
        assert calls == [TORCH] and linear._chosen == {}
        calls.clear()


def test_a_kernel_that_fails_is_not_tried_again(calls):
    def clock(calls):
        if calls[0].func is autotuned_linear.skinny_gemm:
            raise RuntimeError("no kernel image")
        return 1.0

    linear = AutotunedLinear(clock=clock)
    linear.linear(*make())
    linear.linear(*make(8))
    assert calls == [TORCH, TORCH]


@pytest.mark.parametrize("choice", [TORCH, TRITON])
def test_users_can_select_a_way(choice, calls, monkeypatch):
    monkeypatch.setenv("MVLLM_SOME_LINEAR", choice)
    AutotunedLinear(Settings("MVLLM_SOME", None).linear()).linear(*make(out_features=32))
    assert calls == [choice]


def test_the_setting():
    assert Settings("MVLLM_SOME", None).linear() == MEASURED


def test_an_unknown_way_is_an_error(monkeypatch):
    monkeypatch.setenv("MVLLM_SOME_LINEAR", "cublas")
    with pytest.raises(ConfigError, match="MVLLM_SOME_LINEAR='cublas' is not supported; set it to one of measured"):
        Settings("MVLLM_SOME", None).linear()


class Device:
    """A DeviceModule whose graphs call again what was captured."""

    def __init__(self):
        self.now, self.captured, self.replays = 0.0, 0, 0
        self.api = self

    def new_graph(self):
        return self

    def captures(self, graph, pool):
        return contextlib.nullcontext()

    def allows_waiting(self):
        return contextlib.nullcontext()

    def replay(self):
        self.replays += 1
        self.now += 3.0 if self.replays == 1 else 2.0

    def Event(self, enable_timing):
        device = self

        class Made:
            def record(self):
                self.at = device.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        return Made()


def test_the_best_of_a_few_replays_counts():
    device, called = Device(), []
    assert device_seconds(device, [lambda: called.append(1)] * 5) == pytest.approx(2e-3 / 4)
    assert len(called) == 5 + 4 * 5, "each once before the capture, and at least 16 in it"


def test_copies_of_a_weight_exceed_the_cache(monkeypatch):
    class Properties:
        L2_cache_size = 1 << 20

    class Module:
        class api:
            get_device_properties = staticmethod(lambda device: Properties)

    weight = torch.empty(256, 1024, dtype=torch.bfloat16, device="meta")
    copies = autotuned_linear._copies(Module, weight)
    assert len(copies) == 8 and all(copy.shape == weight.shape for copy in copies)
    assert autotuned_linear._copies(Module, torch.empty(8192, 1024, dtype=torch.bfloat16, device="meta")) == []
