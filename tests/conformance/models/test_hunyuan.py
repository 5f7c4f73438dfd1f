"""Hunyuan checkpoints give the outputs of transformers."""

from tests.helpers.parity import NUM_TOKENS, names_of
from tests.helpers.parity_suite import ParitySuite


class TestHunyuan(ParitySuite):
    names = names_of("hunyuan")
    num_tokens = NUM_TOKENS
