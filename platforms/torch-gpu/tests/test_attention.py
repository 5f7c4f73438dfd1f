"""The attention backend against exact attention, with its kernels on Triton's interpreter; input buffers of graphs."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mvllm.plugin_api import RotarySpec, WorkerContext
from mvllm.testing.attention_cases import CacheHarness, expected, make_case, make_layout, make_spec, run, tolerance
from mvllm.testing.suite import test_att_attention
from mvllm_cpu.runtime import CPURuntime

# Skips without Triton. The kernels are imported after it.
importlib.import_module("platforms.torch-gpu.tests.interpreted")

from mvllm_torch_gpu.attention import BLOCK_SIZES, TritonAttention  # noqa: E402
from mvllm_torch_gpu.platform import TorchGpuPlatform  # noqa: E402
from mvllm_torch_gpu.settings import Settings  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # of the interpreter, about the NaN filling

MIXED = [(0, 3), (17, 1), (16, 2)]
LATENT = {"num_heads": 4, "num_kv_heads": 1, "head_size": 48, "value_head_size": 32, "values_in_keys": True}
more = functools.partial(pytest.param, marks=pytest.mark.exhaustive)

runtime = functools.cache(lambda: CPURuntime(WorkerContext()))


class SomePlatform(TorchGpuPlatform):
    """A platform whose devices compute in the other float8 format."""

    title, package, float8 = "Some", "mvllm-some", "float8_e4m3fnuz"
    settings = Settings("MVLLM_SOME", "some")
    spec = init_device = uses_host_memory = None


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 9, "soft_cap": 20.0, "sinks": True},
        {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"},
        LATENT,
        more({}),
        more({"dtype": "float16"}),
        more({"kv_dtype": "int8"}),
        more({"head_size": 24, "value_head_size": 16}),
        more({**LATENT, "kv_dtype": "int8"}),
        more({**LATENT, "value_head_size": 48}),
    ],
    ids=str,
)
def test_attention_is_exact_for_every_kind_of_layer(fields):
    spec = make_spec(**{"head_size": 16, **fields})
    assert TritonAttention.validate(spec) == []
    case = make_case(spec, MIXED, block_size=16, padding=3, padding_requests=2)
    poison = float("nan") if spec.kv_dtype == spec.dtype else None  # filling an 8-bit cache takes seconds
    found = run(TritonAttention(spec), runtime(), case, poison=poison, move_blocks=True)
    real = case.num_real_tokens
    assert found.dtype == case.query.dtype and found.shape == (real + 3, spec.num_heads * spec.value_size)
    assert (found[:real].double() - expected(case)).abs().max() < tolerance(spec.dtype, spec.kv_dtype)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("fields", [{}, LATENT], ids=["heads", "latents"])
def test_a_platform_chooses_the_format_of_float8(fields):
    """Results have the same tolerance, and the stored codes are those of the platform's format."""
    spec = make_spec(**{"head_size": 16, **fields}, kv_dtype="float8_e4m3fn")
    case = make_case(spec, [(0, 3), (2, 1)], block_size=16)
    backend = SomePlatform().attention_backend(spec)
    found = run(backend, runtime(), case)
    assert (found.double() - expected(case)).abs().max() <= tolerance(spec.dtype, spec.kv_dtype)
    harness = CacheHarness(backend, runtime(), 1, 16)
    metadata = harness.begin_step(make_layout([(0, 1)], np.array([[0]], dtype=np.int32), 16))
    key = torch.ones(1, spec.num_kv_heads, spec.head_size)
    backend.write_kv(harness.kv, key, key[..., : spec.value_size], metadata)
    stored, scales = harness.kv[0][0, 0], harness.kv[len(harness.kv) // 2][0, 0]
    assert torch.equal(stored.view(torch.float8_e4m3fnuz).float() * scales[:, None], key[0])
    assert not torch.equal(stored.view(torch.float8_e4m3fn).float() * scales[:, None], key[0])


def test_graph_buffers_give_the_same_result_as_the_steps_own_tables():
    spec = make_spec(head_size=16)
    backend = TritonAttention(spec)
    case = make_case(spec, [(37, 1), (15, 1), (0, 1)], block_size=16, padding=1, padding_requests=1)
    harness = CacheHarness(backend, runtime(), case.num_blocks, 16)
    harness.fill(0.5)
    metadata = harness.begin_step(case.layout)
    assert metadata.is_decode(4)
    buffers = metadata.static_buffers(torch.empty(4, 64, dtype=torch.int32))
    assert buffers.max_seq_len == 64 * 16 and buffers.block_table.shape == (4, 64)
    buffers.block_table.fill_(10**6)  # entries of an earlier step after this step's tables are not read
    for part, given in buffers.parts_to_fill(metadata):
        part.copy_(given)
    queries = torch.cat([case.query, case.query[:1]])[:4]
    assert torch.equal(backend.forward(queries, harness.kv, metadata), backend.forward(queries, harness.kv, buffers))


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("latent", [False, True])
def test_a_cache_has_the_size_of_its_layout(kv_dtype, latent):
    spec = make_spec(kv_dtype=kv_dtype, **(LATENT if latent else {"head_size": 32, "value_head_size": 16}))
    layout = TritonAttention(spec).kv_layout()
    assert layout.block_sizes == BLOCK_SIZES
    cache = TritonAttention(spec).allocate(3, 32, torch.device("cpu"))
    assert sum(part.nbytes for part in cache) == layout.bytes_per_token * 3 * 32
    assert all(torch.isfinite(part.float()).all() for part in cache)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"head_size": 520}, "at most 512 elements, not 520"),
        ({"kv_dtype": "float8_e5m2"}, "KV cache dtype float8_e5m2"),
        ({"dtype": "float64", "kv_dtype": "float32"}, "compute dtype float64"),
        ({"num_heads": 3, "num_kv_heads": 2}, "do not divide"),
    ],
)
def test_unsupported_layers_are_rejected_with_the_reason(fields, reason):
    assert any(reason in problem for problem in TritonAttention.validate(make_spec(**fields)))


def test_a_layer_that_the_kernels_do_not_support_runs_in_plain_torch():
    platform = SomePlatform()
    assert isinstance(platform.attention_backend(make_spec()), TritonAttention)
    assert not isinstance(platform.attention_backend(make_spec(head_size=520)), TritonAttention)


@pytest.mark.parametrize("rotary", test_att_attention.ROTARIES.values(), ids=list(test_att_attention.ROTARIES))
@pytest.mark.parametrize("kv_dtype", [None, more("int8"), "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float32", more("bfloat16")])
def test_norm_rotation_and_write_in_one_launch_are_those_of_the_operations(rotary, kv_dtype, dtype, monkeypatch):
    """The conformance suite's test of `rotary_writer`, with the kernels on the interpreter."""
    monkeypatch.setattr(test_att_attention, "backend_for", lambda subject, spec: TritonAttention(spec))
    subject = SimpleNamespace(capabilities=SimpleNamespace(kv_dtypes=("int8", "float8_e4m3fn")))
    test_att_attention.test_a_rotary_writer_gives_what_the_operations_and_write_kv_give(
        subject, runtime(), dtype, rotary, kv_dtype
    )


def test_latents_are_rotated_before_they_are_put_together():
    assert TritonAttention(make_spec(**LATENT)).rotary_writer(RotarySpec(16)) is None
