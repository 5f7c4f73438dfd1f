"""Runs the tests of the E2E clauses (whole engine) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_e2e_engine import *  # noqa: F403
