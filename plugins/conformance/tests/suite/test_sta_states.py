"""Runs the tests of the STA clauses (sequence states) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_sta_states import *  # noqa: F403
