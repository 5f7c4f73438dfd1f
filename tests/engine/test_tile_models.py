"""Models that cut images into tiles give the tokens of transformers in the engine."""

from __future__ import annotations

import pytest

from tests.helpers.multimodal_suite import MultiModalSuite, check, engine, generate, names_of, oracle

FAMILIES = ("idefics3", "smolvlm", "internvl", "lfm2_vl")


@pytest.mark.shows("tokens")
@pytest.mark.parametrize("name", names_of(*FAMILIES, gate=True))
def test_requests_with_images_and_without_in_one_batch(name: str) -> None:
    expected = oracle(name)
    with engine(expected.folder) as llm:
        (alone,) = generate(llm, [expected.requests[2]])
        check(expected, [alone], [2])
        check(expected, generate(llm, expected.requests[:5]))


@pytest.mark.exhaustive
class TestTiles(MultiModalSuite):
    names = names_of(*FAMILIES)
