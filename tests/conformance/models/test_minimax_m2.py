"""MiniMax-M2 checkpoints give the outputs of transformers."""

import pytest

from tests.helpers.parity import NUM_TOKENS, names_of
from tests.helpers.parity_suite import ParitySuite


@pytest.mark.exhaustive
class TestMiniMaxM2(ParitySuite):
    names = names_of("minimaxm2")
    num_tokens = NUM_TOKENS
