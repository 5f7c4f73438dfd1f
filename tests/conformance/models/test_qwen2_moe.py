"""Qwen2-MoE checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.parity_suite import ParitySuite


class TestQwen2Moe(ParitySuite):
    names = names_of("qwen2moe")
