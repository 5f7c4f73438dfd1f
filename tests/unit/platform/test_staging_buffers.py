"""Buffers that the device may still be reading are not overwritten."""

from __future__ import annotations

import torch

from mvllm.platform.runtime import Event
from mvllm.platform.staging_buffers import StagingBuffers
from tests.unit.worker.builders import HostRuntime


class RecordingRuntime(HostRuntime):
    """Records the calls of its events."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[str, int]] = []
        self._num_events = 0

    def event(self) -> Event:
        notes, number = self.notes, self._num_events
        self._num_events += 1

        class RecordedEvent:
            def record(self) -> None:
                notes.append(("record", number))

            def wait(self) -> None:
                raise AssertionError("the device need not wait")

            def synchronize(self) -> None:
                notes.append(("synchronize", number))

        return RecordedEvent()


def test_a_buffer_is_reused_only_after_the_step_that_used_it_has_ended() -> None:
    runtime = RecordingRuntime()
    staging = StagingBuffers(runtime)
    used = []
    for _ in range(4):
        staging.begin_step()
        used.append(staging.buffer(3, torch.int32).data_ptr())
        staging.end_step()
    assert used[0] == used[2] != used[1] == used[3]
    assert runtime.notes == [
        ("record", 0),
        ("record", 1),
        ("synchronize", 0),
        ("record", 0),
        ("synchronize", 1),
        ("record", 1),
    ]


def test_each_dtype_has_a_separate_buffer_that_grows_if_needed() -> None:
    staging = StagingBuffers(HostRuntime())
    staging.reserve(5, torch.int32)
    staging.begin_step()
    ids, numbers = staging.buffer(5, torch.int32), staging.buffer(3, torch.float32)
    assert len(ids) == 5 and len(numbers) >= 3 and ids.dtype == torch.int32 and numbers.dtype == torch.float32
    assert staging.buffer(2, torch.int32) is ids
    assert len(staging.buffer(100, torch.int32)) >= 100
    ids[:2] = torch.tensor([7, 8])
    assert staging.copy_to_device(ids[:2]).tolist() == [7, 8]
