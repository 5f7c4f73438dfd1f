"""Clauses PRB; see the module imported."""

from mvllm.testing.suite.test_prb_probe import *  # noqa: F403
