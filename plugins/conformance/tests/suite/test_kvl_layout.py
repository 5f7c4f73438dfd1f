"""Runs the tests of the KVL clauses (KV cache layout) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_kvl_layout import *  # noqa: F403
