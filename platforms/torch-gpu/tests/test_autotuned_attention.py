"""Installed attention libraries: which layers they support, and when they are chosen.

The libraries are fakes, and functions of torch operations replace the Triton kernels.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import sys
import types

import numpy as np
import pytest
import torch

from mvllm import plugin_api
from mvllm.plugin_api import ConfigError, PlatformError, WorkerContext
from mvllm.testing.attention_cases import expected, make_case, make_spec, run, tolerance
from mvllm_cpu.runtime import CPURuntime

importlib.import_module("platforms.torch-gpu.tests.interpreted")  # skips without Triton

import mvllm_torch_gpu.attention  # noqa: E402
from mvllm_torch_gpu import attention_libraries, flash_attention, flashinfer_attention  # noqa: E402
from mvllm_torch_gpu.attention import BLOCK_SIZES, TritonAttention  # noqa: E402
from mvllm_torch_gpu.attention_library import AttentionLibrary  # noqa: E402
from mvllm_torch_gpu.attention_measurement import (  # noqa: E402
    REALISTIC_TOKENS,
    StepKind,
    device_seconds,
    realistic_step,
)
from mvllm_torch_gpu.autotuned_attention import TRITON, AutotunedAttention  # noqa: E402
from mvllm_torch_gpu.paged_metadata import PagedMetadata  # noqa: E402
from mvllm_torch_gpu.platform import TorchGpuPlatform  # noqa: E402
from mvllm_torch_gpu.settings import Settings  # noqa: E402
from mvllm_torch_gpu.step_graphs import StepGraphBackend  # noqa: E402

fakes = importlib.import_module("platforms.torch-gpu.tests.fake_attention_libraries")
HostGraphs = importlib.import_module("platforms.torch-gpu.tests.host_graphs").HostGraphs
KERNELS = importlib.import_module("platforms.cuda.tests.hosted_platform").KERNELS

MIXED, DECODES = [(0, 3), (17, 1), (300, 40)], [(16, 1), (0, 1), (299, 1)]
VARIABLE = "MVLLM_SOME_ATTENTION"


class SomePlatform(TorchGpuPlatform):
    title, package, settings = "Some", "mvllm-some", Settings("MVLLM_SOME", "nccl")
    spec = init_device = uses_host_memory = None


@pytest.fixture
def calls(monkeypatch):
    """Installs fakes of all libraries; the list of their called functions."""
    called: list[str] = []
    for name, function in KERNELS.items():
        monkeypatch.setattr(mvllm_torch_gpu.attention, name, _recording(function, called))
    _install(monkeypatch, fakes.make_flash_attn(called), fakes.make_flashinfer(called), fakes.make_varlen(called))
    monkeypatch.setattr(flash_attention, "activate_fa3", lambda: None)
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(flashinfer_attention, "TABLE_TOKENS", 512)
    return called


def _install(monkeypatch, *modules):
    for module in modules:
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def _recording(function, called):
    def call(*args, **options):
        if function.__name__ != "reshape_and_cache":
            called.append(TRITON)
        return function(*args, **options)

    return call


def name_of(way):
    """Name of the implementation that a timed call runs."""
    return way.args[0].name if isinstance(way.args[0], AttentionLibrary) else TRITON


class Clock:
    """A clock that measures shorter times for implementations that come earlier in `names`.

    Attributes:
        timed: The measured steps: (name of the implementation, metadata).
    """

    def __init__(self, *names: str):
        self.names = names
        self.timed: list[tuple[str, PagedMetadata]] = []

    def __call__(self, way):
        name, metadata = name_of(way), way.args[-1]
        self.timed.append((name, metadata))
        return float(self.names.index(name)) if name in self.names else 99.0


def chosen(spec, clock, *names, **options):
    found, reasons = attention_libraries.libraries_for(spec, names or ("flash_attn", "flashinfer"))
    assert found, reasons
    return AutotunedAttention(spec, found, clock=clock, table_tokens=512, **options)


def check(backend, requests, *, block_size, **padding):
    case = make_case(backend.spec, requests, block_size=block_size, **padding)
    found = run(backend, CPURuntime(WorkerContext()), case)
    real = case.num_real_tokens
    assert found.isfinite().all(), "rows of padding, too"
    off = (found[:real].double() - expected(case)).abs().max()
    assert off <= tolerance(backend.spec.dtype, backend.spec.kv_dtype)


PADDING = {"padding": 3, "padding_requests": 2}
EVENLY = {"padding": 1, "padding_requests": 1}  # four rows, a size that is captured


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 9}, {"soft_cap": 20.0}, {"dtype": "float16"}], ids=str)
def test_attention_of_each_library_is_exact(fields, calls):
    spec = make_spec(**{"dtype": "bfloat16", **fields})
    flash = chosen(spec, Clock("flash_attn"), "flash_attn")
    check(flash, MIXED, block_size=256, **PADDING)
    check(flash, DECODES, block_size=256, **EVENLY)
    assert calls[-1] == "kvcache" and "varlen" in calls
    flashinfer = chosen(spec, Clock("flashinfer"), "flashinfer")
    check(flashinfer, MIXED, block_size=16, **PADDING)
    assert calls[-2:] == ["plan", "run"]
    check(flashinfer, DECODES, block_size=16, **EVENLY)
    assert calls[-2:] == ["plan decode", "run decode"]
    if "soft_cap" not in fields:
        varlen = chosen(spec, Clock("varlen_attn"), "varlen_attn")
        check(varlen, MIXED, block_size=16, **PADDING)
        check(varlen, DECODES, block_size=16, **EVENLY)
        assert calls[-1] == "varlen_attn"
    assert TRITON not in calls


def test_steps_that_a_library_does_not_support_use_the_kernels(calls):
    spec = make_spec(dtype="bfloat16")
    check(chosen(spec, Clock("flash_attn"), "flash_attn"), MIXED, block_size=16)
    assert set(calls) == {TRITON}, "blocks of 16"
    calls.clear()
    check(chosen(spec, Clock("flashinfer"), "flashinfer"), DECODES, block_size=16)
    assert calls[-1] == TRITON, "three requests are no size that is captured"
    check(chosen(spec, Clock("flashinfer"), "flashinfer"), [(16, 1), (600, 1)], block_size=16)
    assert calls[-1] == TRITON, "longer than a graph's table"


def test_the_choice_is_made_once_for_each_kind_of_step_on_steps_of_realistic_length(calls, monkeypatch):
    monkeypatch.setattr(flashinfer_attention, "TABLE_TOKENS", 4096)
    spec, clock = make_spec(dtype="bfloat16"), Clock("flashinfer", "flash_attn")
    backend = chosen(spec, clock)
    check(backend, MIXED, block_size=256)
    kinds = {(step.query_start_loc.tolist()[1], len(step.seq_lens)) for _, step in clock.timed}
    assert kinds == {(256, 1), (32, 1)}, "the cached tokens' step and the step, in powers of two"
    assert {name for name, _ in clock.timed} == {TRITON, "flash_attn", "flashinfer"}
    assert calls[-1] == "run"
    calls.clear()
    timed = len(clock.timed)
    check(backend, MIXED, block_size=256)
    assert len(clock.timed) == timed and calls[-2:] == ["plan", "run"] and TRITON not in calls
    check(backend, DECODES, block_size=256, **EVENLY)
    (_, step), *others = [(name, step) for name, step in clock.timed[timed:] if len(step.seq_lens) == 4]
    assert len(others) == 2 and calls[-1] == "run decode"
    assert step.is_decode(4) and step.block_table.shape == (4, 7), "sequences that use every block of the cache"
    calls.clear()
    check(backend, [(4, 1), (0, 1), (1, 1)], block_size=256, **EVENLY)
    assert calls[-1] == "run decode" and TRITON not in calls, "the lengths at hand do not matter"


def test_a_step_for_a_measurement_has_realistic_sequences_in_the_whole_cache():
    batch = realistic_step(StepKind(True, 8, 1, 16), 1000, 1 << 13, torch.device("cpu"))
    assert batch.seq_lens.tolist() == [REALISTIC_TOKENS] * 8 and batch.max_seq_len == 1 << 13
    assert batch.block_table_device.shape == (8, (1 << 13) // 16), "as wide as in a graph"
    assert len(np.unique(batch.block_table)) == 1000 and batch.slot_mapping.tolist() == [-1] * 8
    batch = realistic_step(StepKind(False, 2, 4096, 16), 1000, 1 << 13, torch.device("cpu"))
    assert batch.query_start_loc.tolist() == [0, 4096, 8192] and batch.seq_lens.tolist() == [4096, 4096]
    batch = realistic_step(StepKind(False, 1, 64, 16), 10, 1 << 13, torch.device("cpu"))
    assert batch.seq_lens.tolist() == [160], "no longer than the cache"


def test_nothing_is_measured_without_a_cache_or_while_a_step_is_computed(calls):
    spec, clock = make_spec(dtype="bfloat16"), Clock("flashinfer")
    backend = chosen(spec, clock, "flashinfer")
    case = make_case(spec, MIXED, block_size=16)
    backend.allocate(1, 16, torch.device("cpu"))  # that of the profile run
    assert backend.build_metadata(case.layout).library is None and not clock.timed
    cache = backend.allocate(case.num_blocks, 16, torch.device("cpu"))
    metadata = backend.build_metadata(case.layout)
    timed = len(clock.timed)
    assert metadata.library is not None and timed == 2
    backend.forward(case.query, cache, metadata)
    assert len(clock.timed) == timed
    del cache
    assert all(part() is None for part in backend._cache_parts), "a sleeping engine frees the cache"


def test_a_captured_step_replays_with_the_plan_of_each_step(calls):
    spec, graphs = make_spec(dtype="bfloat16"), HostGraphs()
    backend = chosen(spec, Clock("flashinfer"), "flashinfer")
    cases = [
        make_case(spec, requests, block_size=16, **EVENLY)
        for requests in ([(16, 1), (0, 1), (299, 1)], [(3, 1), (40, 1), (17, 1)], [(150, 1), (2, 1), (9, 1)])
    ]
    cache = backend.allocate(max(case.num_blocks for case in cases), 16, torch.device("cpu"))
    with torch.inference_mode():
        step = StepGraphBackend(lambda: graphs, "test", table_tokens=512).compile(
            lambda query, metadata: backend.forward(query, cache, metadata), dynamic=True
        )
        for case in cases:
            for part in cache:
                part.fill_(0.0)
            for r, (before, new) in enumerate(case.requests):
                for position in range(before + new):
                    block, slot = case.layout.block_table[r, position // 16], position % 16
                    cache[0][block, slot], cache[1][block, slot] = case.keys[r][position], case.values[r][position]
            layout = dataclasses.replace(case.layout, kind=plugin_api.StepKind.DECODE, capture=True)
            found = step(case.query, backend.build_metadata(layout))
            off = (found[:3].double() - expected(case)).abs().max()
            assert off <= tolerance(spec.dtype, spec.kv_dtype) and found.isfinite().all()
    assert graphs.captures == 1 and graphs.replays == 3 and TRITON not in calls
    assert calls.count("plan decode") == 4, "one for the measurement, one in each step"


def test_a_graph_for_longer_sequences_than_a_library_supports_uses_the_kernels(calls):
    backend = chosen(make_spec(dtype="bfloat16"), Clock("flashinfer"), "flashinfer")
    case = make_case(backend.spec, DECODES, block_size=16, **EVENLY)
    cache = backend.allocate(case.num_blocks, 16, torch.device("cpu"))
    metadata = backend.build_metadata(case.layout)
    assert metadata.library is not None and cache
    same, longer = (torch.zeros((4, pages), dtype=torch.int32) for pages in (512 // 16, 4096 // 16))
    assert metadata.static_buffers(same).library is metadata.library
    assert metadata.static_buffers(longer).library is None


def test_a_plan_waits_until_the_previous_one_has_been_copied():
    happened: list[str] = []

    class Event:
        def record(self):
            happened.append("record")

        def synchronize(self):
            happened.append("wait")

    wrapper = flashinfer_attention._DecodeWrapper(None, Event())
    for _ in range(2):
        wrapper.wait_for_previous_plan()
        wrapper.has_planned()
    assert happened == ["record", "wait", "record"]


def test_a_failing_library_is_dropped_and_one_that_cannot_be_timed_is_not_used(calls):
    spec = make_spec(dtype="bfloat16")

    def failing(way):
        if name_of(way) == "flashinfer":
            raise FileNotFoundError("nvcc")
        return 1.0

    backend = chosen(spec, failing, "flashinfer")
    check(backend, MIXED, block_size=16)
    assert calls[-1] == TRITON
    calls.clear()
    check(backend, [*MIXED, (5, 90)], block_size=16)
    assert set(calls) == {TRITON}, "not asked again"
    backend = chosen(spec, lambda way: None, "flashinfer")
    check(backend, MIXED, block_size=16)
    assert calls[-1] == TRITON


def test_the_kernels_are_used_unless_a_library_is_clearly_faster(calls):
    spec = make_spec(dtype="bfloat16")
    for faster, last in ((0.99, TRITON), (0.9, "run")):
        seconds = {TRITON: 1.0, "flashinfer": faster}
        check(chosen(spec, lambda way, of=seconds: of[name_of(way)], "flashinfer"), MIXED, block_size=16)
        assert calls[-1] == last


def test_a_call_is_timed():
    found = []
    assert device_seconds(torch.device("cpu"), lambda: found.append(1), replayed=True) >= 0
    assert len(found) > 1


def test_varlen_attn_needs_flash_attention_3_and_a_torch_that_takes_block_tables(monkeypatch):
    names, spec = ("varlen_attn",), make_spec(dtype="bfloat16")
    found, [reason] = attention_libraries.libraries_for(spec, names)
    assert not found and "compute capability 9.0" in reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 4))  # HIP's for gfx942
    monkeypatch.setattr(torch.version, "cuda", None)
    found, [reason] = attention_libraries.libraries_for(spec, names)
    assert not found and "needs a CUDA device" in reason
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found, [reason] = attention_libraries.libraries_for(spec, names)
    assert not found and "FlashAttention 2, which has no block tables" in reason and "flash_attn_interface" in reason
    old = types.ModuleType(fakes.VARLEN)
    old.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None: None
    _install(monkeypatch, old)
    found, [reason] = attention_libraries.libraries_for(spec, names)
    assert not found and "block_table, enable_gqa, seqused_k, window_size" in reason


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
        (None, {"flash_attn", "flashinfer", "varlen_attn"}, 256),
        ("flashinfer", {"flashinfer"}, 16),
        ("varlen_attn", {"varlen_attn"}, 16),
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
        assert set(calls) & {"varlen", "run", "varlen_attn"} and TRITON not in calls, "without a look at the time"


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
