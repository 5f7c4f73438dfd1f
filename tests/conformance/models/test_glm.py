"""GLM-4 checkpoints give the outputs of transformers."""

from tests.helpers.parity import names_of
from tests.helpers.parity_suite import ParitySuite


class TestGLM4(ParitySuite):
    names = names_of("glm", "glm4")
