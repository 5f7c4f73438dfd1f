"""Runs the tests of the PLG clauses (plugin) of the platform contract; they are in mvllm_conformance.suite."""

from mvllm_conformance.suite.test_plg_plugin import *  # noqa: F403
