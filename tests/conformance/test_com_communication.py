"""Clauses COM; see the module imported."""

from mvllm.testing.suite.test_com_communication import *  # noqa: F403
