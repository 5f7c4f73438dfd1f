"""GPT-OSS checkpoints give what transformers gives."""

from tests.helpers.parity import names_of
from tests.helpers.parity_suite import ParitySuite


class TestGptOss(ParitySuite):
    names = names_of("gptoss")
