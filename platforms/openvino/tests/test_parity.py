"""Greedy tokens of transformers from models that run through OpenVINO: alone, in batches, after prefix hits, in chunks.

The engine's KV cache has blocks of 32 tokens, the only size of OpenVINO's attention on processors.
"""

from __future__ import annotations

import pytest

from tests.helpers import parity, parity_suite
from tests.helpers.parity_suite import ParitySuite

FEW = ("llama-gqa", "gptoss", "gemma3")
"""Checkpoints of ordinary runs: plain; experts, windows and sinks; norms of queries and keys, two kinds of RoPE."""
FAMILIES = (
    *("llama-gqa", "llama-mqa-biases", "llama-rope-yarn", "mistral-window", "qwen2", "qwen3", "opt", "gpt2"),
    *("gemma2", "gemma3", "gemma4", "phi3", "phi3-longrope-window", "granite", "olmo2", "olmo3", "glm4", "starcoder2"),
    *("falcon-new", "smollm3", "seedoss", "exaone4", "cohere2", "ernie45", "hunyuan", "ministral3"),
    *("mixtral", "qwen2moe", "qwen3moe", "gptoss", "deepseek2", "deepseek3", "glm4moe", "ernie45moe", "minimaxm2"),
    *("hunyuanmoe", "mistral4"),
)


@pytest.fixture(autouse=True)
def openvino_with_its_blocks(monkeypatch):
    monkeypatch.setenv("MVLLM_PLATFORM", "openvino")
    for module in (parity, parity_suite):
        monkeypatch.setattr(module, "BLOCK_SIZE", 32)


def pytest_generate_tests(metafunc):
    if "checkpoint" in metafunc.fixturenames:
        marks = {name: () if name in FEW else pytest.mark.exhaustive for name in FAMILIES}
        metafunc.parametrize("checkpoint", [pytest.param(name, marks=marks[name]) for name in FAMILIES])


@pytest.mark.slow
class TestThroughOpenVINO(ParitySuite):
    pass


def test_tokens_without_log_probabilities_are_the_same():
    parity.check_tokens_without_logprobs()
