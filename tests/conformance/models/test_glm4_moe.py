"""GLM-4 MoE checkpoints give the outputs of transformers."""

import pytest

from tests.helpers.parity import NUM_TOKENS, names_of
from tests.helpers.parity_suite import ParitySuite


@pytest.mark.exhaustive
class TestGlm4Moe(ParitySuite):
    names = names_of("glm4moe", "glm4moelite")
    num_tokens = NUM_TOKENS
