"""One ring with both ends in this process: order, wrap-around, back-pressure, waits and every error."""

from __future__ import annotations

import threading
import time

import msgspec
import numpy as np
import pytest

from mvllm.errors import ConfigError
from mvllm.executor.message_queue import (
    MessageQueue,
    QueueClosedError,
    QueueCorruptError,
    QueueError,
    QueueSettings,
    QueueStoppedError,
    QueueTimeoutError,
    ReaderGroup,
    RingShape,
    StopSignal,
)
from mvllm.executor.message_queue import frames as framing
from mvllm.executor.message_queue import notifier as notifiers

SMALL = QueueSettings(num_slots=3, slot_bytes=1024)


class Ends:
    """A queue with all its ends in this process."""

    def __init__(self, num_readers=1, settings=SMALL, message_type=dict, stop=None):
        self.queue = MessageQueue.create("steps", [f"Worker_TP{i}" for i in range(num_readers)], settings=settings)
        self.writer = self.queue.open_writer(stop)
        self.readers = [self.queue.open_reader(i, message_type, stop) for i in range(num_readers)]
        self.reader = self.readers[0]

    def close(self):
        for end in (self.writer, *self.readers, self.queue):
            end.close()


@pytest.fixture
def make_ends():
    made = []

    def make(*args, **kwargs):
        made.append(Ends(*args, **kwargs))
        return made[-1]

    yield make
    for ends in made:
        ends.close()


@pytest.fixture(params=["eventfd", "pipe"], autouse=True)
def wake_up(request, monkeypatch):
    """Runs every test with both kinds of notifier."""
    if request.param == "pipe":
        monkeypatch.setattr(notifiers, "HAS_EVENTFD", False)
    elif not notifiers.HAS_EVENTFD:
        pytest.skip("this system has no eventfd")


def test_messages_arrive_in_order_many_times_round_the_ring(make_ends):
    ends = make_ends(2)
    for number in range(50):
        ends.writer.enqueue({"number": number}, timeout=5)
        for reader in ends.readers:
            assert reader.dequeue(5) == ({"number": number}, [])
    ends.reader.source._in._ring.check_integrity()


def test_exactly_num_slots_messages_fit_until_the_slowest_reader_has_read_one(make_ends):
    ends = make_ends(2)
    for number in range(3):
        ends.writer.enqueue({"number": number}, timeout=0)
    with pytest.raises(QueueTimeoutError):
        ends.writer.enqueue({}, timeout=0)
    ends.readers[0].dequeue(0)
    with pytest.raises(QueueTimeoutError, match=r"Message 1 was .* reader 1 \(Worker_TP1, pid \d+\)\. All 3"):
        ends.writer.enqueue({}, timeout=0)
    ends.readers[1].dequeue(0)
    ends.writer.enqueue({}, timeout=0)
    with pytest.raises(QueueTimeoutError):
        ends.writer.enqueue({}, timeout=0)


def test_a_refused_message_was_not_sent(make_ends):
    ends = make_ends()
    for number in range(3):
        ends.writer.enqueue({"number": number})
    with pytest.raises(QueueTimeoutError):
        ends.writer.enqueue({"number": 99}, timeout=0.01)
    assert [ends.reader.dequeue(0)[0]["number"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(QueueTimeoutError):
        ends.reader.dequeue(0)


def test_the_writers_timeout_names_the_slow_reader(make_ends):
    ends = make_ends()
    for _ in range(3):
        ends.writer.enqueue({})
    with pytest.raises(QueueTimeoutError, match=r"not released by reader 0 \(Worker_TP0, pid \d+\)"):
        ends.writer.enqueue({}, timeout=0.01)


def test_the_readers_timeout_names_the_writer(make_ends):
    ends = make_ends()
    with pytest.raises(QueueTimeoutError, match=r"message 1 did not come in time from the writer .*, pid"):
        ends.reader.dequeue(0.01)


def test_a_slot_is_free_once_its_message_is_read(make_ends):
    ends = make_ends()
    for number in range(3):
        ends.writer.enqueue({"number": number}, [np.full(8, number)])
    with pytest.raises(QueueTimeoutError):
        ends.writer.enqueue({}, timeout=0)
    message, buffers = ends.reader.dequeue(0)
    ends.writer.enqueue({}, [np.full(8, 7)], timeout=0)
    assert message == {"number": 0} and bytes(buffers[0]) == np.full(8, 0).tobytes(), "a copy"


def test_a_message_that_keeps_a_view_of_its_slot_raises_an_error(make_ends):
    class Kept(msgspec.Struct):
        value: msgspec.Raw

    ends = make_ends(message_type=Kept)
    ends.writer.enqueue({"value": [1, 2, 3]})
    with pytest.raises(QueueError, match="a buffer of message 1 is still in use"):
        ends.reader.dequeue(0)
    for _ in range(3):
        ends.writer.enqueue({}, timeout=0)


def test_a_message_of_the_wrong_type_is_refused_and_counts_as_read(make_ends):
    class Plan(msgspec.Struct):
        step: int

    ends = make_ends(message_type=Plan)
    ends.writer.enqueue({"step": "three"})
    ends.writer.enqueue(Plan(step=4))
    with pytest.raises(msgspec.ValidationError):
        ends.reader.dequeue(0)
    assert ends.reader.dequeue(0)[0] == Plan(step=4)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 800, 895, 896, 897, 1023, 1024, 1025, 5000, 300_000])
def test_buffers_of_any_size_arrive_whole_on_both_sides_of_the_slot_limit(make_ends, size):
    ends = make_ends(2)
    payload = np.random.default_rng(size).bytes(size)
    for number in range(5):
        ends.writer.enqueue({"number": number}, [payload, b"tail"], timeout=5)
        for reader in ends.readers:
            message, buffers = reader.dequeue(5)
            assert message == {"number": number}
            assert [bytes(buffer) for buffer in buffers] == [payload, b"tail"]


def test_the_largest_message_that_fits_does_not_touch_the_socket(make_ends):
    ends = make_ends()
    overhead = framing.packed_bytes([b"\x80", b""])  # the table and an empty dict
    ends.writer.enqueue({}, [bytes(1024 - overhead)])
    assert ends.writer._overflow is None
    ends.writer.enqueue({}, [bytes(1024 - overhead + 1)])
    assert ends.writer._overflow is not None
    for size in (1024 - overhead, 1024 - overhead + 1):
        assert len(ends.reader.dequeue(5)[1][0]) == size


def test_large_messages_use_slots_like_any_other(make_ends):
    ends = make_ends()
    for number in range(3):
        ends.writer.enqueue({"number": number}, [bytes(5000)])
    with pytest.raises(QueueTimeoutError):
        ends.writer.enqueue({}, timeout=0)
    assert [ends.reader.dequeue(5)[0]["number"] for _ in range(3)] == [0, 1, 2]


def test_a_large_buffer_may_be_changed_once_it_is_sent(make_ends):
    ends = make_ends()
    array = np.zeros(100_000, np.uint8)
    ends.writer.enqueue({}, [array])
    array[:] = 7
    assert not any(ends.reader.dequeue(5)[1][0])


def test_a_buffer_that_is_not_contiguous_is_refused(make_ends):
    with pytest.raises(TypeError, match=r"shape \(4,\).*not contiguous"):
        make_ends().writer.enqueue({}, [np.arange(8)[::2]])


def test_a_wait_ends_when_the_message_comes(make_ends):
    ends = make_ends()
    threading.Timer(0.05, ends.writer.enqueue, [{"late": True}]).start()
    assert ends.reader.dequeue(10)[0] == {"late": True}


def test_a_wait_for_a_slot_ends_when_one_is_free(make_ends):
    ends = make_ends()
    for _ in range(3):
        ends.writer.enqueue({})
    threading.Timer(0.05, ends.reader.dequeue).start()
    ends.writer.enqueue({}, timeout=10)


def test_the_stop_signal_ends_a_wait_at_once_and_every_later_one(make_ends):
    stop = StopSignal()
    ends = make_ends(stop=stop)
    threading.Timer(0.05, stop.set).start()
    started = time.monotonic()
    with pytest.raises(QueueStoppedError, match="Queue steps was stopped while it waited for message 1"):
        ends.reader.dequeue()
    assert time.monotonic() - started < 60
    ends.writer.enqueue({})
    assert ends.reader.dequeue() == ({}, [])  # published messages are still delivered
    with pytest.raises(QueueStoppedError):
        ends.reader.dequeue()
    for _ in range(3):
        ends.writer.enqueue({})
    with pytest.raises(QueueStoppedError, match="a free slot"):
        ends.writer.enqueue({})


def test_closed_ends_raise_and_may_be_closed_twice(make_ends):
    ends = make_ends()
    ends.close()
    ends.close()
    with pytest.raises(QueueClosedError, match="steps"):
        ends.writer.enqueue({})
    with pytest.raises(QueueClosedError, match="steps"):
        ends.reader.dequeue()


def test_a_dropped_reader_is_not_waited_for(make_ends):
    ends = make_ends(2)
    for _ in range(3):
        ends.writer.enqueue({})
        ends.readers[0].dequeue(0)
    with pytest.raises(QueueTimeoutError, match="reader 1"):
        ends.writer.enqueue({}, timeout=0)
    ends.writer.drop_reader(1)
    for number in range(10):
        ends.writer.enqueue({"number": number}, timeout=0)
        assert ends.readers[0].dequeue(0)[0] == {"number": number}


def test_a_slot_that_another_process_has_overwritten_is_noticed(make_ends):
    ends = make_ends()
    ends.writer.enqueue({})
    ends.writer._ring.publish(4, 10, 0)  # message 4 belongs in the slot of message 1
    with pytest.raises(QueueCorruptError, match="The slot of message 1 holds message 4"):
        ends.reader.dequeue(0)


def test_a_group_wakes_up_for_any_of_its_readers(make_ends):
    first, second = make_ends(), make_ends()
    group = ReaderGroup([first.reader, second.reader])
    with pytest.raises(QueueTimeoutError):
        group.wait(0.01)
    threading.Timer(0.05, second.writer.enqueue, [{"from": 2}]).start()
    assert group.wait(10) == [second.reader]
    assert group.wait(10) == [second.reader]  # still there
    first.writer.enqueue({"from": 1}, [bytes(5000)])
    assert group.wait(10) == [first.reader, second.reader]
    assert second.reader.dequeue(0)[0] == {"from": 2}
    assert group.wait(10) == [first.reader]


@pytest.mark.parametrize("frames", [[b"a"], [b""], [b"x" * 64, b"", b"y" * 65], [b"m"] * 40])
def test_frames_are_unpacked_as_packed_and_start_on_cache_lines(frames):
    memory = memoryview(bytearray(framing.packed_bytes(frames)))
    framing.pack(frames, memory)
    assert [bytes(view) for view in framing.unpack(memory)] == frames


@pytest.mark.parametrize("count, length", [(0, 0), (1 << 40, 0), (1, 1 << 63), (1, 65)])
def test_packed_frames_that_contradict_their_memory_are_refused(count, length):
    memory = memoryview(bytearray(128)).cast("Q")
    memory[0], memory[1] = count, length
    with pytest.raises(QueueCorruptError):
        framing.unpack(memory.cast("B"))


@pytest.mark.parametrize("shape", [(1, 0, 1024), (1, 5000, 1024), (1, 3, 8), (-1, 3, 1024)])
def test_invalid_ring_sizes_are_refused(shape):
    with pytest.raises(ConfigError, match="slots of"):
        RingShape(*shape)
