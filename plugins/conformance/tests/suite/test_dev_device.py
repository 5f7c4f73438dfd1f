"""Runs the tests of the DEV clauses (device) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_dev_device import *  # noqa: F403
