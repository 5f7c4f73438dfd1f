"""Qwen-VL and GLM-4V in the engine give the tokens of transformers."""

from __future__ import annotations

import pytest

from tests.helpers.multimodal_suite import MultiModalSuite, check, engine, generate, names_of, oracle

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe")


@pytest.mark.shows("tokens")
@pytest.mark.parametrize("name", names_of(*FAMILIES, gate=True))
def test_requests_with_images_and_without_in_one_batch(name: str) -> None:
    expected = oracle(name)
    with engine(expected.folder) as llm:
        (alone,) = generate(llm, [expected.requests[2]])
        check(expected, [alone], [2])
        check(expected, generate(llm, expected.requests[:5]))


@pytest.mark.exhaustive
class TestGrids(MultiModalSuite):
    names = names_of(*FAMILIES)
