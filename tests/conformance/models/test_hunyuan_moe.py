"""Hunyuan MoE checkpoints give the outputs of transformers."""

import pytest

from tests.helpers.parity import NUM_TOKENS, names_of
from tests.helpers.parity_suite import ParitySuite


@pytest.mark.exhaustive
class TestHunyuanMoe(ParitySuite):
    names = names_of("hunyuanmoe")
    num_tokens = NUM_TOKENS
