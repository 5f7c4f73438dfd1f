"""Clauses E2E; see the module imported."""

from mvllm.testing.suite.test_e2e_engine import *  # noqa: F403
