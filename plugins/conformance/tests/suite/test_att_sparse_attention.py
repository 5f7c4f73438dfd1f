"""Runs the tests of the clauses ATT-15 and ATT-16 (sparse attention); they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_att_sparse_attention import *  # noqa: F403
