"""Runs the tests of the KVT clauses (copies to host memory) of the contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_kvt_transfer import *  # noqa: F403
