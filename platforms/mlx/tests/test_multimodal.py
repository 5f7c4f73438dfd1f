"""Images with models that run with MLX: the tokens of transformers. Encoders run in torch, in the worker."""

from __future__ import annotations

import pytest

from tests.helpers.multimodal_suite import MultiModalSuite, check, engine, generate, names_of, oracle

FAMILIES = ("llava", "qwen2_vl", "qwen3_vl", "mistral3")


@pytest.fixture(autouse=True)
def mlx(monkeypatch):
    monkeypatch.setenv("MVLLM_PLATFORM", "mlx")


def test_images_with_deepstack_and_text_in_one_batch():
    expected = oracle("qwen3_vl")
    with engine(expected.folder, max_num_batched_tokens=24) as llm:
        check(expected, generate(llm, expected.requests[:3], num_tokens=16))


@pytest.mark.exhaustive
class TestWithMLX(MultiModalSuite):
    names = names_of(*FAMILIES)
