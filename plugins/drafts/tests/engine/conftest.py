"""Engines with the methods of this package."""

from tests.engine.conftest import checkpoint as checkpoint
from tests.engine.conftest import make_llm as make_llm
from tests.engine.conftest import stack as stack
