"""Qwen3-MoE checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.parity_suite import ParitySuite


class TestQwen3Moe(ParitySuite):
    names = names_of("qwen3moe")
