"""OLMo 3 checkpoints give the outputs of transformers."""

from tests.helpers.parity import NUM_TOKENS, names_of
from tests.helpers.parity_suite import ParitySuite


class TestOLMo3(ParitySuite):
    names = names_of("olmo3")
    num_tokens = NUM_TOKENS
