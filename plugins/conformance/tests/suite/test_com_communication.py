"""Runs the tests of the COM clauses (communication) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_com_communication import *  # noqa: F403
