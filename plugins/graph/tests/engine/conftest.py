"""Engines on platforms with a graph compiler."""

from tests.engine.conftest import stack as stack
