"""The whole engine on the XPU platform with the host as its device: the same tokens as on the CPU platform."""

from __future__ import annotations

import importlib

import platforms.cuda.tests.interpreted  # noqa: F401  # skips without Triton; must precede imports of kernels
import pytest
import torch
from platforms.xpu.tests import hosted_plugin
from platforms.xpu.tests.fake_device import XPU

from mvllm import LLM, SamplingParams
from tests.helpers.model_zoo import ZOO, make_checkpoint
from tests.helpers.plugins import prepend

pytestmark = pytest.mark.slow

PROMPTS = [{"prompt_token_ids": [5 + 7 * i + j for j in range(3 + 4 * i)]} for i in range(3)]
PARAMS = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (12, 5, 9)]
SETTINGS = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
MEMORY = 256 << 20
"""Bytes of the device whose memory sizes the KV cache. The device's tensors are resident in this process."""
FEW = ("llama-gqa", "gptoss", "deepseek3")
"""Models of ordinary runs: plain; windows with sinks and two block tables; latents."""

models = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.exhaustive) for name in ZOO]
)


@pytest.fixture
def generate(tmp_path, monkeypatch):
    """`generate(checkpoint, platform, ...)`: the tokens of three requests."""
    prepend(monkeypatch, hosted_plugin.path(tmp_path / "plugins"))
    monkeypatch.delenv("MVLLM_XPU_COMPILE", raising=False)
    attention = importlib.import_module("mvllm_torch_gpu.attention")
    for name in importlib.import_module("platforms.cuda.tests.hosted_platform").KERNELS:
        monkeypatch.setattr(attention, name, getattr(attention, name))  # the platform replaces it; restored at the end

    def run(folder, platform, **settings):
        XPU.graphs.clear()
        options = {**SETTINGS, "kv_cache_memory_bytes": 1 << 20, **settings}
        with LLM(str(folder), platform=platform, **options) as llm:
            return tokens_of(llm)

    return run


def tokens_of(llm):
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@models
def test_tokens_are_those_of_the_cpu_platform_with_and_without_graphs(name, generate, tmp_path, monkeypatch):
    folder = make_checkpoint(name, tmp_path)
    expected = generate(folder, "cpu")
    assert generate(folder, "hosted-xpu") == expected
    assert XPU.graphs == [], "graphs are an option"
    monkeypatch.setenv("MVLLM_XPU_COMPILE", "graphs")
    assert generate(folder, "hosted-xpu") == expected
    # Decode steps of 1, 2 and 4 requests, mixed steps of 16, 32 and 64 tokens, and the head of each.
    assert len(XPU.graphs) == 12, "before the first request"
    assert sum(graph.replays for graph in XPU.graphs) > 12


@models
def test_tokens_without_kernels_are_those_of_the_cpu_platform(name, generate, tmp_path):
    folder = make_checkpoint(name, tmp_path)
    assert generate(folder, "hosted-xpu-sdpa") == generate(folder, "cpu")


@pytest.mark.parametrize("reports_free", [False, True])
def test_the_kv_cache_is_sized_with_and_without_reported_free_memory(generate, tmp_path, monkeypatch, reports_free):
    monkeypatch.setattr(XPU, "reports_free", reports_free)
    monkeypatch.setattr(XPU, "memory_bytes", MEMORY)
    folder = make_checkpoint("llama-gqa", tmp_path)
    expected = generate(folder, "cpu")
    with LLM(str(folder), platform="hosted-xpu-sdpa", **SETTINGS) as llm:
        assert MEMORY // 4 < llm.llm_engine.cache_summary.total_bytes < MEMORY
        assert tokens_of(llm) == expected


def test_a_step_that_waits_in_a_capture_runs_without_a_graph(generate, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MVLLM_XPU_COMPILE", "graphs")
    kernels = importlib.import_module("platforms.cuda.tests.hosted_platform").KERNELS
    folder = make_checkpoint("llama-gqa", tmp_path)
    expected = generate(folder, "cpu")
    real = kernels["paged_attention"]

    def asks(query, *args, **options):
        assert not bool(torch.isnan(query).any())
        return real(query, *args, **options)

    monkeypatch.setitem(kernels, "paged_attention", asks)
    assert generate(folder, "hosted-xpu") == expected
    assert "run without a graph, at least the next 16: The step cannot be captured in a graph" in caplog.text
    assert "makes the host wait for the device" in caplog.text
