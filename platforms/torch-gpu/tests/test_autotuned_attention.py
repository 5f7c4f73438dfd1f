"""Installed attention libraries: which layers they support, and when they are chosen.

The libraries are fakes, and functions of torch operations replace the Triton kernels.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys

import pytest
import torch

from mvllm.plugin_api import ConfigError, PlatformError, WorkerContext
from mvllm.testing.attention_cases import expected, make_case, make_spec, run, tolerance
from mvllm_cpu.runtime import CPURuntime

importlib.import_module("platforms.torch-gpu.tests.interpreted")  # skips without Triton

import mvllm_torch_gpu.attention  # noqa: E402
from mvllm_torch_gpu import attention_libraries  # noqa: E402
from mvllm_torch_gpu.attention import BLOCK_SIZES, TritonAttention  # noqa: E402
from mvllm_torch_gpu.autotuned_attention import TRITON, AutotunedAttention, device_seconds  # noqa: E402
from mvllm_torch_gpu.platform import TorchGpuPlatform  # noqa: E402
from mvllm_torch_gpu.settings import Settings  # noqa: E402

fakes = importlib.import_module("platforms.torch-gpu.tests.fake_attention_libraries")
KERNELS = importlib.import_module("platforms.cuda.tests.hosted_platform").KERNELS

MIXED, DECODES = [(0, 3), (17, 1), (300, 40)], [(16, 1), (0, 1), (299, 1)]
VARIABLE = "MVLLM_SOME_ATTENTION"


class SomePlatform(TorchGpuPlatform):
    title, package, settings = "Some", "mvllm-some", Settings("MVLLM_SOME", "nccl")
    spec = init_device = uses_host_memory = None


@pytest.fixture
def calls(monkeypatch):
    """Installs fakes of both libraries; the list of their called functions."""
    called: list[str] = []
    for name, function in KERNELS.items():
        monkeypatch.setattr(mvllm_torch_gpu.attention, name, _recording(function, called))
    _install(monkeypatch, fakes.make_flash_attn(called), fakes.make_flashinfer(called))
    monkeypatch.setattr(attention_libraries, "WORKSPACE_BYTES", 16)
    return called


def _install(monkeypatch, *modules):
    for module in modules:
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def _recording(function, called):
    def call(*args, **options):
        if function.__name__ != "write_kv":
            called.append(TRITON)
        return function(*args, **options)

    return call


def clock_with_order(*names):
    """A clock that measures shorter times for implementations that come earlier in `names`."""

    def clock(way):
        library = way.args[0] if way.args else None
        name = getattr(library, "name", TRITON)
        return float(names.index(name)) if name in names else 99.0

    return clock


def chosen(spec, clock, *names, **options):
    found, reasons = attention_libraries.libraries_for(spec, names or ("flash_attn", "flashinfer"))
    assert found, reasons
    return AutotunedAttention(spec, found, clock=clock, **options)


def check(backend, requests, *, block_size, **padding):
    case = make_case(backend.spec, requests, block_size=block_size, **padding)
    found = run(backend, CPURuntime(WorkerContext()), case)
    real = case.num_real_tokens
    assert found.isfinite().all(), "rows of padding, too"
    off = (found[:real].double() - expected(case)).abs().max()
    assert off <= tolerance(backend.spec.dtype, backend.spec.kv_dtype)


PADDING = {"padding": 3, "padding_requests": 2}
EVENLY = {"padding": 2, "padding_requests": 2}


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 9}, {"soft_cap": 20.0}, {"dtype": "float16"}], ids=str)
def test_attention_of_each_library_is_exact(fields, calls):
    spec = make_spec(**{"dtype": "bfloat16", **fields})
    flash = chosen(spec, clock_with_order("flash_attn"), "flash_attn")
    check(flash, MIXED, block_size=256, **PADDING)
    check(flash, DECODES, block_size=256, **EVENLY)
    assert calls[-1] == "kvcache" and "varlen" in calls and TRITON not in calls
    check(chosen(spec, clock_with_order("flashinfer"), "flashinfer"), MIXED, block_size=16, **PADDING)
    assert calls[-2:] == ["plan", "run"] and TRITON not in calls


def test_steps_that_a_library_does_not_support_use_the_kernels(calls):
    spec = make_spec(dtype="bfloat16")
    check(chosen(spec, clock_with_order("flash_attn"), "flash_attn"), MIXED, block_size=16)
    assert set(calls) == {TRITON}, "blocks of 16"
    calls.clear()
    check(chosen(spec, clock_with_order("flashinfer"), "flashinfer"), DECODES, block_size=16, **EVENLY)
    assert calls[-1] == TRITON, "a step that a graph may replay"


def test_the_fastest_implementation_is_chosen_once_for_each_kind_of_step(calls):
    spec, timed = make_spec(dtype="bfloat16"), []

    def clock(way):
        timed.append(way)
        way()
        return clock_with_order("flashinfer", "flash_attn")(way)

    backend = chosen(spec, clock)
    check(backend, MIXED, block_size=256)
    assert len(timed) == 3 and calls[-1] == "run"
    calls.clear()
    check(backend, MIXED, block_size=256)
    assert len(timed) == 3 and calls[-2:] == ["plan", "run"] and TRITON not in calls
    calls.clear()
    check(backend, DECODES, block_size=256, **EVENLY)
    assert len(timed) == 5 and calls[-1] == "kvcache", "no plan for a decode: two ways"


def test_a_failing_library_is_dropped_and_one_that_cannot_be_timed_is_kept(calls):
    spec = make_spec(dtype="bfloat16")

    def failing(way):
        if way.args[:1] and getattr(way.args[0], "name", "") == "flashinfer":
            raise RuntimeError("no kernel image")
        return clock_with_order("flashinfer", TRITON)(way)

    backend = chosen(spec, failing, "flashinfer")
    check(backend, MIXED, block_size=16)
    assert calls[-1] == TRITON
    calls.clear()
    check(backend, [*MIXED, (5, 90)], block_size=16)
    assert set(calls) == {TRITON}, "not asked again"
    backend = chosen(spec, lambda way: None, "flashinfer")
    check(backend, MIXED, block_size=16)
    assert backend._chosen == {} and "run" not in calls


def test_a_call_is_timed():
    found = []
    assert device_seconds(torch.device("cpu"), lambda: found.append(1)) >= 0
    assert len(found) > 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sinks": True}, "no sinks"),
        ({"dtype": "float32"}, "not in float32"),
        ({"kv_dtype": "int8"}, "not of int8"),
        ({"head_size": 64, "value_head_size": 32}, "values of the keys' size"),
        ({"head_size": 36}, "36"),
    ],
)
def test_layers_that_no_library_supports_use_the_triton_kernels(fields, reason, calls):
    spec = make_spec(**{"dtype": "bfloat16", **fields})
    found, reasons = attention_libraries.libraries_for(spec, ("flash_attn", "flashinfer"))
    assert found == [] and all(any(reason in text for text in (r,)) for r in reasons), reasons
    assert type(SomePlatform().attention_backend(spec)) is TritonAttention


def test_an_old_library_is_used_for_the_layers_it_supports(calls, monkeypatch):
    _install(monkeypatch, fakes.make_flash_attn(calls, soft_cap=False))
    names = ("flash_attn",)
    assert attention_libraries.libraries_for(make_spec(dtype="float16"), names)[0]
    found, [reason] = attention_libraries.libraries_for(make_spec(dtype="float16", soft_cap=30.0), names)
    assert not found and "softcap in flash_attn_with_kvcache" in reason


@pytest.mark.parametrize(
    ("value", "libraries", "first_block"),
    [
        (None, {"flash_attn", "flashinfer"}, 256),
        ("flashinfer", {"flashinfer"}, 16),
        ("flash_attn", {"flash_attn"}, 256),
    ],
)
def test_users_can_select_a_library(value, libraries, first_block, calls, monkeypatch):
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    backend = SomePlatform().attention_backend(make_spec(dtype="bfloat16"))
    assert isinstance(backend, AutotunedAttention) and set(backend._libraries) == libraries
    sizes = backend.kv_layout().block_sizes
    assert sizes[0] == first_block and sorted(sizes) == sorted(BLOCK_SIZES)
    if value is not None:
        check(backend, MIXED, block_size=first_block)
        assert set(calls) & {"varlen", "run"} and TRITON not in calls, "without a look at the time"


def test_users_can_select_the_kernels_and_unknown_names_raise(calls, monkeypatch):
    monkeypatch.setenv(VARIABLE, TRITON)
    assert type(SomePlatform().attention_backend(make_spec(dtype="bfloat16"))) is TritonAttention
    monkeypatch.setenv(VARIABLE, "xformers")
    with pytest.raises(ConfigError, match=f"{VARIABLE}='xformers' is not supported"):
        SomePlatform.settings.attention()


def test_a_selected_library_that_cannot_be_imported_is_an_error(calls, monkeypatch):
    monkeypatch.setenv(VARIABLE, "flash_attn")
    with pytest.raises(PlatformError, match=rf"{VARIABLE}=flash_attn: flash_attn has no sinks.*Unset {VARIABLE}"):
        SomePlatform().attention_backend(make_spec(dtype="bfloat16", sinks=True))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(attention_libraries.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlatformError, match="flash_attn is not installed"):
        SomePlatform().attention_backend(make_spec(dtype="bfloat16"))
