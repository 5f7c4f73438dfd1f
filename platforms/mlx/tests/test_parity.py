"""Greedy tokens of transformers from models that run with MLX: alone, in batches, after prefix hits, in chunks."""

from __future__ import annotations

import pytest

from tests.helpers import parity
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
def mlx(monkeypatch):
    monkeypatch.setenv("MVLLM_PLATFORM", "mlx")


def pytest_generate_tests(metafunc):
    if "checkpoint" in metafunc.fixturenames:
        marks = {name: () if name in FEW else pytest.mark.exhaustive for name in FAMILIES}
        metafunc.parametrize("checkpoint", [pytest.param(name, marks=marks[name]) for name in FAMILIES])


@pytest.mark.slow
class TestWithMLX(ParitySuite):
    pass


def test_tokens_without_log_probabilities_are_the_same():
    parity.check_tokens_without_logprobs()
