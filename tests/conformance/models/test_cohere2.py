"""Cohere2 checkpoints give the outputs of transformers."""

from tests.helpers.parity import NUM_TOKENS, names_of
from tests.helpers.parity_suite import ParitySuite


class TestCohere2(ParitySuite):
    names = names_of("cohere2")
    num_tokens = NUM_TOKENS
