"""Runs the tests of the CFG clauses (configuration) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_cfg_configuration import *  # noqa: F403
