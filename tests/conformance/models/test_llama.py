"""Llama checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.parity_suite import ParitySuite


class TestLlama(ParitySuite):
    names = names_of("llama")
