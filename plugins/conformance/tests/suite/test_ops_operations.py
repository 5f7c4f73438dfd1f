"""Runs the tests of the OPS clauses (operations) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_ops_operations import *  # noqa: F403
