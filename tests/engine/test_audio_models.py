"""Models that hear give the tokens of transformers in the engine."""

from __future__ import annotations

import pytest

from tests.helpers.audio_suite import AudioSuite, audio_oracle
from tests.helpers.multimodal_suite import check, engine, generate, names_of

FAMILIES = ("qwen2_audio", "voxtral", "gemma4_audio")


# Voxtral, whose windows have 1,500 positions, is in the exhaustive tests, and in the gate with its encoder alone.
@pytest.mark.shows("tokens")
@pytest.mark.parametrize("name", names_of("qwen2_audio", gate=True))
def test_requests_with_sounds_and_without_in_one_batch(name: str) -> None:
    expected = audio_oracle(name)
    with engine(expected.folder) as llm:
        (alone,) = generate(llm, [expected.requests[2]])
        check(expected, [alone], [2])
        check(expected, generate(llm, expected.requests[:5]))


@pytest.mark.exhaustive
class TestAudio(AudioSuite):
    names = names_of(*FAMILIES)
