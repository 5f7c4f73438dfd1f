"""Runs the tests of the GRF clauses (graphs) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_grf_graphs import *  # noqa: F403
