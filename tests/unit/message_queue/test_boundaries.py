"""A process killed at any instruction boundary: no message is lost, repeated or reordered, and no wait hangs.

Tests every boundary between two instructions of the queue's own code, and every line boundary if a wait or a socket
makes each run slow.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fresh_programs  # a process without torch forks in a tenth of the time, hundreds of times

ROOT = Path(__file__).parents[3]
NUM_SLOTS = 3
LARGE = 5000  # bytes: more than a slot holds


def deaths(role: str, size: int, *options: str) -> list[dict[str, int]]:
    """The messages that the survivors received, for a kill at each boundary, in order of the boundaries."""
    command = [sys.executable, "-m", "tests.helpers.queue_boundaries", role, str(size), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CASES = pytest.mark.parametrize(
    ("size", "options", "least"),
    [
        (100, (), 200),
        pytest.param(100, ("--line", "--wait"), 40, marks=pytest.mark.exhaustive),
        pytest.param(LARGE, ("--line",), 40, marks=pytest.mark.exhaustive),
    ],
    ids=["in a slot", "while it waits", "through the socket"],
)


@pytest.mark.slow
@CASES
def test_a_reader_may_die_between_any_two_instructions_of_receiving_a_message(
    size: int, options: tuple[str, ...], least: int
) -> None:
    seen = deaths("reader", size, *options)
    assert len(seen) >= least
    sent = [death["sent"] for death in seen]
    assert set(sent) == {1 + NUM_SLOTS, 2 + NUM_SLOTS}, "only released slots are free"
    if not options:  # every run has the same boundaries
        assert sent == sorted(sent), "a message is released at one boundary, and from there on"
    assert {death["after"] for death in seen} == {2 * NUM_SLOTS}


@pytest.mark.slow
@CASES
def test_a_writer_may_die_between_any_two_instructions_of_sending_a_message(
    size: int, options: tuple[str, ...], least: int
) -> None:
    seen = deaths("writer", size, *options)
    assert len(seen) >= least
    before = NUM_SLOTS if "--wait" in options else 1
    got = [(death["first"], death["second"]) for death in seen]
    together = {(before, before), (before + 1, before + 1)}
    if not options:
        assert set(got) == {*together, (before + 1, before)}, "readers are notified one after the other"
    elif size < LARGE:  # the number of polls during a wait differs between runs, so a boundary may be left out
        assert together <= set(got) <= {*together, (before + 1, before)}
    else:  # data that the socket has not sent is lost with its writer
        assert (before, before) in got and set(got) <= {*together, (before + 1, before), (before, before + 1)}
    if not options:
        assert got == sorted(got), "the message is there for one reader, then for the other, and stays"
