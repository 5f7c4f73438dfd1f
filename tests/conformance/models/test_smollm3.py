"""SmolLM3 checkpoints give the outputs of transformers."""

from tests.helpers.parity import NUM_TOKENS, names_of
from tests.helpers.parity_suite import ParitySuite


class TestSmolLM3(ParitySuite):
    names = names_of("smollm3")
    num_tokens = NUM_TOKENS
