"""Runs the tests of the PLG clauses (plugin) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_plg_plugin import *  # noqa: F403
