"""Clauses SMP; see the module imported."""

from mvllm.testing.suite.test_smp_sampling import *  # noqa: F403
