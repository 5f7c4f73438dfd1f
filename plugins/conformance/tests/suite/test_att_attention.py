"""Runs the tests of the ATT clauses (attention) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_att_attention import *  # noqa: F403
