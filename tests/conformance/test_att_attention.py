"""Clauses ATT; see the module imported."""

from mvllm.testing.suite.test_att_attention import *  # noqa: F403
