"""LFM2 checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.state_parity_suite import StateParitySuite


class TestLfm2(StateParitySuite):
    names = names_of("lfm2", "lfm2moe")
