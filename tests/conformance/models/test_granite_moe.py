"""Granite MoE checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.parity_suite import ParitySuite


class TestGraniteMoe(ParitySuite):
    names = names_of("granitemoe")
