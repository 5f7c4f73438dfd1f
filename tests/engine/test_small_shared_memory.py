"""Two ranks with a /dev/shm as small as in a container: correct tokens or an error with a hint, never a signal.

Each engine runs in a separate mount namespace with a file system of that size on /dev/shm.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine import small_memory_program
from tests.helpers import parity
from tests.helpers.small_shared_memory import MIB, mount, needs_mount

WHICH = (0, 5, 6, 8, 10, 11, 15)
OTHERS = 32 << 10
"""Bytes used by others: libraries have semaphores there."""

SIZES = pytest.mark.parametrize("size", [pytest.param(64 * MIB, marks=pytest.mark.exhaustive), 1 * MIB])

pytestmark = needs_mount


def run(size: int, *options: str) -> tuple[dict[str, Any], str]:
    """The engine program's output and stderr; it must exit by itself, without a signal."""
    expected = parity.oracle("llama-gqa", WHICH, 24)
    program = [sys.executable, str(Path(small_memory_program.__file__)), str(expected.folder)]
    done = subprocess.run(
        [*mount(size), *program, json.dumps(expected.prompts), *options], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
@SIZES
def test_anonymous_memory_does_not_depend_on_the_file_system(size: int) -> None:
    found, _ = run(size)
    assert found["tokens"] == parity.oracle("llama-gqa", WHICH, 24).tokens
    assert max(found["while"], found["used"]) <= OTHERS


@pytest.mark.slow
@SIZES
@pytest.mark.exhaustive
def test_without_anonymous_memory_rings_shrink_into_the_file_system(size: int) -> None:
    found, _ = run(size, "--without-anonymous-memory")
    assert found["tokens"] == parity.oracle("llama-gqa", WHICH, 24).tokens
    assert OTHERS < found["while"] < size, "the rings lie there"
    assert found["used"] <= OTHERS, "and nothing is left of them"


@pytest.mark.slow
def test_if_not_even_the_smallest_rings_fit_the_engine_fails_with_a_hint() -> None:
    found, _ = run(MIB // 4, "--without-anonymous-memory")
    assert "SharedMemoryError: 3 message queues request" in found["refusal"]
    assert "/dev/shm has" in found["refusal"] and "--shm-size" in found["refusal"]
    assert found["used"] <= OTHERS
