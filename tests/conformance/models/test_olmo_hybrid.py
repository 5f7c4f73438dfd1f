"""OLMo hybrid checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.state_parity_suite import StateParitySuite


class TestOlmoHybrid(StateParitySuite):
    names = names_of("olmohybrid")
