"""EXAONE 4 checkpoints give the outputs of transformers."""

from tests.helpers.parity import NUM_TOKENS, names_of
from tests.helpers.parity_suite import ParitySuite


class TestExaone4(ParitySuite):
    names = names_of("exaone4")
    num_tokens = NUM_TOKENS
