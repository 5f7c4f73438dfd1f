"""Clauses SHP; see the module imported."""

from mvllm.testing.suite.test_shp_shapes import *  # noqa: F403
