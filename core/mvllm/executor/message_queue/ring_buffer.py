"""A ring of slots in shared memory: one process writes, n processes read, every reader reads every message.

Message s (counted from 1) is stored in slot (s - 1) % num_slots. The writer may fill the slot when every reader has
released message s - num_slots; a reader may read it when the writer has published it. Both permissions are tokens in
kernel counters, two per reader: `items` (writer to reader, one per message) and `space` (reader to writer, one per
message released). Only the holder of the token accesses the slot, and taking a token orders memory (see notifier.py).
No load or store in this memory grants a permission: the flags in it are only hints, so plain Python stores without
fences are enough on weakly ordered CPUs too.

The memory, in 64-byte lines so that no two processes write the same line:

    byte 0         preamble   magic | num_readers | num_slots | slot_bytes     64 bytes, written at creation
         64        writer     messages published | pid                         64 bytes, written by the writer
         128       reader 0   messages released (its acknowledgement) | pid    64 bytes, written by reader 0
         192       reader 1   ...
         page      slot 0     sequence | length | kind                         64 bytes, written by the writer
           + 64               payload                                          slot_bytes bytes, written by the writer
                   slot 1     ...

All numbers are unsigned 64-bit in native byte order. A slot's sequence is stored last: a reader that spins reads it as
a hint, and a reader that holds the token checks it. Counts are there for `check_integrity`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence

import msgspec
import numpy as np

from mvllm.errors import ConfigError
from mvllm.executor.message_queue import frames as framing
from mvllm.executor.message_queue.errors import QueueCorruptError
from mvllm.executor.message_queue.shared_segment import SharedSegment

LINE = 64
WORD = 8
MAGIC = int.from_bytes(b"mvllmMQ2", "little")
MAX_SLOTS = 2048  # tokens outstanding must fit the smallest pipe

_LABEL = struct.Struct("=QQQ")  # of a slot: sequence, length, kind
_LENGTH_AND_KIND = struct.Struct("=QQ")
WRITER = 0  # the party of the writer; reader r is party r + 1


class RingShape(msgspec.Struct, frozen=True):
    """The size of a ring.

    Attributes:
        num_readers: Readers on this machine.
        num_slots: The number of messages that may be unread at once.
        slot_bytes: The largest payload that fits a slot.
    """

    num_readers: int
    num_slots: int = 10
    slot_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.num_readers < 0 or not 1 <= self.num_slots <= MAX_SLOTS or self.slot_bytes < LINE:
            raise ConfigError(
                f"A ring of {self.num_slots} slots of {self.slot_bytes} bytes for {self.num_readers} readers was asked "
                f"for; it takes 1 to {MAX_SLOTS} slots of {LINE} bytes or more, and no negative number of readers."
            )

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return LINE + _round_up(self.slot_bytes, LINE)

    @property
    def slots_offset(self) -> int:
        """Bytes before the first slot."""
        return _round_up(LINE * (2 + self.num_readers), mmap.PAGESIZE)

    @property
    def total_bytes(self) -> int:
        return _round_up(self.slots_offset + self.stride * self.num_slots, mmap.PAGESIZE)


class ShmRingBuffer:
    """The memory and its fields. Its owner, RingWriter or RingReader, controls access to the slots.

    Args:
        segment: Memory that `create` laid out; taken over.
    """

    def __init__(self, segment: SharedSegment) -> None:
        self.segment = segment
        self._words = segment.view.cast("Q")
        self._bytes = np.frombuffer(segment.view, np.uint8)
        if self._words[0] != MAGIC:
            raise QueueCorruptError("The shared memory behind this handle holds no ring of this version of mvllm.")
        num_readers, num_slots, slot_bytes = self._words[1:4].tolist()
        self.shape = RingShape(num_readers, num_slots, slot_bytes)
        self.num_slots: int = num_slots
        self.slot_bytes: int = slot_bytes
        self._slots = self.shape.slots_offset
        self._stride = self.shape.stride

    @classmethod
    def create(cls, shape: RingShape, name: str, directory: str | None = None) -> ShmRingBuffer:
        """An empty ring.

        Raises:
            SharedMemoryError: There is not enough shared memory for it.
        """
        segment = SharedSegment.create(shape.total_bytes, name, directory)
        with segment.view.cast("Q") as words:
            words[1] = shape.num_readers
            words[2] = shape.num_slots
            words[3] = shape.slot_bytes
            words[0] = MAGIC
        return cls(segment)

    # ------------------------------------------------------------------------------------------------------- the slots

    def payload(self, sequence: int, length: int) -> memoryview:
        """The first `length` bytes of the slot of message `sequence`, in place.

        Its `obj` belongs to this view alone, and every object made from the view refers to it, so the reference count
        of `obj` shows whether the slot is still in use.
        """
        start = self._slot(sequence) + LINE
        return self._bytes[start : start + length].data

    def fill(self, sequence: int, frames: Sequence[bytes | memoryview]) -> None:
        """Packs `frames`, which fit, into the slot of message `sequence`."""
        framing.pack(frames, self.segment.view, self._slot(sequence) + LINE)

    def publish(self, sequence: int, length: int, kind: int) -> None:
        """Labels a filled slot. The sequence is stored last, as the hint for spinning readers to look for a token."""
        slot = self._slot(sequence)
        _LENGTH_AND_KIND.pack_into(self.segment.view, slot + WORD, length, kind)
        words = self._words
        words[slot // WORD] = sequence
        words[LINE // WORD] = sequence  # the writer's count

    def hint(self, sequence: int) -> bool:
        """Whether message `sequence` seems to be published. Grants no permission to read it."""
        return self._words[self._slot(sequence) // WORD] == sequence

    def label(self, sequence: int) -> tuple[int, int]:
        """(length, kind) of message `sequence`, for a reader that holds its token.

        Raises:
            QueueCorruptError: The slot holds another message.
        """
        found, length, kind = _LABEL.unpack_from(self.segment.view, self._slot(sequence))
        if found != sequence or length > self.slot_bytes:
            raise QueueCorruptError(
                f"The slot of message {sequence} holds message {found} of {length} bytes (slots have "
                f"{self.slot_bytes}). Something other than its writer has written to the ring."
            )
        return length, kind

    def _slot(self, sequence: int) -> int:
        return self._slots + (sequence - 1) % self.num_slots * self._stride

    # ----------------------------------------------------------------------------------------------------- the parties

    def set_count(self, party: int, count: int) -> None:
        self._words[_party(party) // WORD] = count

    def count(self, party: int) -> int:
        """Messages published (writer) or released (reader)."""
        return self._words[_party(party) // WORD]

    def set_pid(self, party: int, pid: int) -> None:
        self._words[_party(party) // WORD + 1] = pid

    def pid(self, party: int) -> int:
        """The process id of the party, or 0 before it has attached."""
        return self._words[_party(party) // WORD + 1]

    def check_integrity(self) -> None:
        """Raises QueueCorruptError if counts contradict each other. For a ring that no process is using."""
        published = self.count(WRITER)
        for reader in range(self.shape.num_readers):
            released = self.count(1 + reader)
            if not max(0, published - self.num_slots) <= released <= published:
                raise QueueCorruptError(
                    f"{published} messages were published in {self.num_slots} slots, but reader {reader} "
                    f"acknowledged {released}."
                )
        for sequence in range(max(1, published - self.num_slots + 1), published + 1):
            self.label(sequence)

    def close(self) -> None:
        """Idempotent."""
        self._words.release()
        self._bytes = np.empty(0, np.uint8)
        self.segment.close()


def _party(party: int) -> int:
    return LINE * (1 + party)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
