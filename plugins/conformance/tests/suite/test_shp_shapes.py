"""Runs the tests of the SHP clauses (shapes) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_shp_shapes import *  # noqa: F403
