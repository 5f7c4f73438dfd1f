"""Clauses PLG; see the module imported."""

from mvllm.testing.suite.test_plg_plugin import *  # noqa: F403
