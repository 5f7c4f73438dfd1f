"""Qwen3-Next checkpoints give the outputs of transformers."""

import pytest

from tests.helpers.parity import names_of
from tests.helpers.state_parity_suite import StateParitySuite

pytestmark = pytest.mark.exhaustive  # tests/engine/test_delta_hybrids.py has a form for every run


class TestQwen3Next(StateParitySuite):
    names = names_of("qwen3next")
