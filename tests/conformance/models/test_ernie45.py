"""ERNIE 4.5 checkpoints give the outputs of transformers."""

from tests.helpers.parity import NUM_TOKENS, names_of
from tests.helpers.parity_suite import ParitySuite


class TestErnie45(ParitySuite):
    names = names_of("ernie45")
    num_tokens = NUM_TOKENS
