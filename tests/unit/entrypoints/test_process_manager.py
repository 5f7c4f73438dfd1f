"""The process above several API servers: what it tells them when one of them dies; no process needed."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import msgspec

from mvllm.engine.process.message_socket import DatagramDoor, datagram_pair
from mvllm.entrypoints.openai.server.process_manager import _Crew
from mvllm.entrypoints.openai.server.process_messages import EndServing


def test_two_deaths_at_once_are_one_signal_to_the_others():
    """A second one would have them abort what they are to finish."""
    ours, theirs = (DatagramDoor(end) for end in datagram_pair())
    crew: Any = object.__new__(_Crew)
    crew._servers = [SimpleNamespace(failure=f"{index} died.", expect_end=lambda: None) for index in range(2)]
    crew._settings = SimpleNamespace(shutdown_timeout=60.0)
    crew._links, crew._orders, crew._deadline = [], [ours], float("inf")
    assert crew._note_server_death(0) and crew._note_server_death(1)
    told = [msgspec.msgpack.decode(data, type=EndServing) for data in iter(theirs.receive, None)]
    assert told == [EndServing(signal.SIGTERM)] and crew._status == 1
    for end in (ours, theirs):
        end.close()
