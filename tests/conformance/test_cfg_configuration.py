"""Clauses CFG; see the module imported."""

from mvllm.testing.suite.test_cfg_configuration import *  # noqa: F403
