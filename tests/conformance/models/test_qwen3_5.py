"""Qwen3.5 checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.state_parity_suite import StateParitySuite


class TestQwen3_5(StateParitySuite):
    names = names_of("qwen35", "qwen35moe")
