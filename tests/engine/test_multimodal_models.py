"""Multimodal models in the engine give the tokens of transformers."""

from __future__ import annotations

import pytest

from tests.helpers.multimodal_suite import MultiModalSuite, check, engine, generate, names_of, oracle

FAMILIES = ("llava", "llava_onevision", "gemma3", "gemma4", "mistral3")


NUM_TOKENS = 12


@pytest.mark.shows("tokens")
@pytest.mark.parametrize("name", names_of(*FAMILIES, gate=True))
def test_requests_with_images_and_without_in_one_batch(name: str) -> None:
    expected = oracle(name)
    with engine(expected.folder) as llm:
        (alone,) = generate(llm, [expected.requests[2]], NUM_TOKENS)
        check(expected, [alone], [2])
        check(expected, generate(llm, expected.requests[:3], NUM_TOKENS))


@pytest.mark.exhaustive
class TestVision(MultiModalSuite):
    names = names_of(*FAMILIES)
