"""Runs the tests of the KVL clauses (KV cache layout) of the platform contract; they are in mvllm.testing.suite."""

from mvllm.testing.suite.test_kvl_layout import *  # noqa: F403
