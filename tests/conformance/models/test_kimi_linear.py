"""Kimi Linear checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.state_parity_suite import StateParitySuite


class TestKimiLinear(StateParitySuite):
    names = names_of("kimilinear")
