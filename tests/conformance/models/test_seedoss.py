"""Seed-OSS checkpoints give the outputs of transformers."""

from tests.helpers.parity import NUM_TOKENS, names_of
from tests.helpers.parity_suite import ParitySuite


class TestSeedOss(ParitySuite):
    names = names_of("seedoss")
    num_tokens = NUM_TOKENS
