"""Clauses GRF; see the module imported."""

from mvllm.testing.suite.test_grf_graphs import *  # noqa: F403
