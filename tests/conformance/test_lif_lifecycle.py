"""Clauses LIF; see the module imported."""

from mvllm.testing.suite.test_lif_lifecycle import *  # noqa: F403
