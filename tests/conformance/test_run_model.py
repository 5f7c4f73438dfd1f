"""Clauses RUN; see the module imported."""

from mvllm.testing.suite.test_run_model import *  # noqa: F403
