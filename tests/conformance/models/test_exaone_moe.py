"""EXAONE MoE checkpoints give the outputs of transformers."""

import pytest

from tests.helpers.parity import NUM_TOKENS, names_of
from tests.helpers.parity_suite import ParitySuite


@pytest.mark.exhaustive
class TestExaoneMoe(ParitySuite):
    names = names_of("exaonemoe")
    num_tokens = NUM_TOKENS
