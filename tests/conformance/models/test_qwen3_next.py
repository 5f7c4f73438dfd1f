"""Qwen3-Next checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.state_parity_suite import StateParitySuite


class TestQwen3Next(StateParitySuite):
    names = names_of("qwen3next")
