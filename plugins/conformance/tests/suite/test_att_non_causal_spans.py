"""Runs the tests of the clause ATT-17 (non-causal spans); they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_att_non_causal_spans import *  # noqa: F403
