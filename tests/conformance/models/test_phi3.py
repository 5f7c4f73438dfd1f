"""Phi-3 checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.parity_suite import ParitySuite


class TestPhi3(ParitySuite):
    names = names_of("phi3")
