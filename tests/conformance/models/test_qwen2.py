"""Qwen2 checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.parity_suite import ParitySuite


class TestQwen2(ParitySuite):
    names = names_of("qwen2")
