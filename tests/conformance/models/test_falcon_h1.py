"""Falcon-H1 checkpoints give the outputs of transformers."""

import pytest

from tests.helpers.parity import names_of
from tests.helpers.state_parity_suite import StateParitySuite


@pytest.mark.exhaustive  # tests/engine/test_mamba_hybrids.py has the quick form
class TestFalconH1(StateParitySuite):
    names = names_of("falconh1")
