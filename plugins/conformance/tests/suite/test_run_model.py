"""Runs the tests of the RUN clauses (models) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_run_model import *  # noqa: F403
