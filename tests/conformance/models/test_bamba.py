"""Bamba checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.state_parity_suite import StateParitySuite


class TestBamba(StateParitySuite):
    names = names_of("bamba")
