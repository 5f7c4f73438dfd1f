"""Clauses DEV; see the module imported."""

from mvllm.testing.suite.test_dev_device import *  # noqa: F403
