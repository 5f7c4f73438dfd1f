"""Clauses OPS; see the module imported."""

from mvllm.testing.suite.test_ops_operations import *  # noqa: F403
