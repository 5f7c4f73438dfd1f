"""Runs the tests of the PRB clauses (probe) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_prb_probe import *  # noqa: F403
