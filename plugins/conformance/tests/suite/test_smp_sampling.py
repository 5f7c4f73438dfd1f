"""Runs the tests of the SMP clauses (sampling) of the platform contract; they are in mvllm.testing.suite."""

from mvllm_conformance.suite.test_smp_sampling import *  # noqa: F403
