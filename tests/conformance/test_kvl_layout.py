"""Clauses KVL; see the module imported."""

from mvllm.testing.suite.test_kvl_layout import *  # noqa: F403
