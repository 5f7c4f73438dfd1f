"""Runs the tests of the STA clauses (sequence states) of the platform contract; they are in mvllm_conformance.suite."""

from mvllm_conformance.suite.test_sta_states import *  # noqa: F403
