"""Runs the tests of the PRB clauses (probe) of the platform contract; they are in mvllm_conformance.suite."""

from mvllm_conformance.suite.test_prb_probe import *  # noqa: F403
