"""Runs the tests of the LIF clauses (lifecycle) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_lif_lifecycle import *  # noqa: F403
