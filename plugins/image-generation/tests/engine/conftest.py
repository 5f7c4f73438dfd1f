"""The fixtures of core's tests of engines."""

from tests.engine.conftest import checkpoint as checkpoint
from tests.engine.conftest import make_llm as make_llm
from tests.engine.conftest import stack as stack
from tests.engine.conftest import time_for_stacks as time_for_stacks
