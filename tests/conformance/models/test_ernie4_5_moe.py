"""ERNIE 4.5 MoE checkpoints give the outputs of transformers."""

import pytest

from tests.helpers.parity import NUM_TOKENS, names_of
from tests.helpers.parity_suite import ParitySuite


@pytest.mark.exhaustive
class TestErnie45Moe(ParitySuite):
    names = names_of("ernie45moe")
    num_tokens = NUM_TOKENS
