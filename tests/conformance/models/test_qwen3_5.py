"""Qwen3.5 checkpoints give the outputs of transformers."""

import pytest

from tests.helpers.parity import names_of
from tests.helpers.state_parity_suite import StateParitySuite

pytestmark = pytest.mark.exhaustive  # tests/engine/test_delta_hybrids.py has a form for every run


class TestQwen3_5(StateParitySuite):
    names = names_of("qwen35", "qwen35moe")
