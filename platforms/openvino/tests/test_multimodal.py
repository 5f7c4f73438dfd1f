"""Images with models that run through OpenVINO: the tokens of transformers. Encoders run in torch, on the host."""

from __future__ import annotations

import pytest

from tests.helpers import multimodal_suite, parity
from tests.helpers.multimodal_suite import MultiModalSuite, check, engine, generate, names_of, oracle

FAMILIES = ("llava", "qwen2_vl", "qwen3_vl", "mistral3")


@pytest.fixture(autouse=True)
def openvino_with_its_blocks(monkeypatch):
    monkeypatch.setenv("MVLLM_PLATFORM", "openvino")
    for module in (parity, multimodal_suite):
        monkeypatch.setattr(module, "BLOCK_SIZE", 32)


def test_images_with_deepstack_and_text_in_one_batch():
    expected = oracle("qwen3_vl")
    with engine(expected.folder, max_num_batched_tokens=24) as llm:
        check(expected, generate(llm, expected.requests[:3], num_tokens=16))


@pytest.mark.exhaustive
class TestThroughOpenVINO(MultiModalSuite):
    names = names_of(*FAMILIES)
