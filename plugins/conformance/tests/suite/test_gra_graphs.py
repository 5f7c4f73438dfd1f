"""Runs the tests of the GRA clauses (models as graphs) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_gra_graphs import *  # noqa: F403
