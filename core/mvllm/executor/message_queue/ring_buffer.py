"""A ring of slots in shared memory: one process writes, n read, every reader reads every message.

The idea: message s (counting from 1) lies in slot (s - 1) % num_slots. The writer may fill it when every reader is done
with message s - num_slots; a reader may look at it when the writer is done with it. Both permissions are tokens in
kernel counters, two per reader: `items` (writer to reader, one per message) and `space` (reader to writer, one per
message released). Who holds the token may touch the slot, and taking a token orders memory (see notifier.py). No load
or store in this memory decides who may do what: a flag seen early, late or never is only a hint, which is why plain
Python stores without fences are enough on weakly ordered CPUs too.

The memory, in 64-byte lines so that no two processes write the same line:

    byte 0         preamble   magic | num_readers | num_slots | slot_bytes     64 bytes, written at creation
         64        writer     messages published | pid                         64 bytes, written by the writer
         128                  activity: UTF-8 text, zero-terminated            192 bytes
         320       reader 0   messages released (its acknowledgement) | pid    64 bytes, written by reader 0
         384                  activity                                         192 bytes
         576       reader 1   ...
         page      slot 0     sequence | length | kind                         64 bytes, written by the writer
           + 64               payload                                          slot_bytes bytes, written by the writer
                   slot 1     ...

All numbers are unsigned 64-bit, in the machine's order. A slot's sequence is stored last: a reader that spins looks at
it for a hint, and a reader that holds the token checks it. Counts and activities are there for people (error messages)
and for `check_integrity`.
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
MAGIC = int.from_bytes(b"mvllmMQ1", "little")
MAX_SLOTS = 2048  # tokens outstanding must fit the smallest pipe

_ACTIVITY_BYTES = 192
_PARTY_BYTES = LINE + _ACTIVITY_BYTES
_LABEL = struct.Struct("=QQQ")  # of a slot: sequence, length, kind
_LENGTH_AND_KIND = struct.Struct("=QQ")
WRITER = 0  # the party of the writer; reader r is party r + 1


class RingShape(msgspec.Struct, frozen=True):
    """How large a ring is.

    Attributes:
        num_readers: Readers on this machine.
        num_slots: Messages that may be on their way at once.
        slot_bytes: Largest payload that fits a slot.
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
        return _round_up(LINE + _PARTY_BYTES * (1 + self.num_readers), mmap.PAGESIZE)

    @property
    def total_bytes(self) -> int:
        return _round_up(self.slots_offset + self.stride * self.num_slots, mmap.PAGESIZE)


class ShmRingBuffer:
    """The memory and its fields. Who may use which slot is decided by its owner, RingWriter or RingReader.

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
            SharedMemoryError: There is not enough room for it.
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

        Its `obj` belongs to this view alone, and whatever is made of the view refers to it: its reference count tells
        whether anything still uses the slot.
        """
        start = self._slot(sequence) + LINE
        return self._bytes[start : start + length].data

    def fill(self, sequence: int, frames: Sequence[bytes | memoryview]) -> None:
        """Packs `frames`, which fit, into the slot of message `sequence`."""
        framing.pack(frames, self.segment.view, self._slot(sequence) + LINE)

    def publish(self, sequence: int, length: int, kind: int) -> None:
        """Labels a filled slot. The sequence comes last: a spinning reader takes it as the hint to look for a token."""
        slot = self._slot(sequence)
        _LENGTH_AND_KIND.pack_into(self.segment.view, slot + WORD, length, kind)
        words = self._words
        words[slot // WORD] = sequence
        words[LINE // WORD] = sequence  # the writer's count

    def hint(self, sequence: int) -> bool:
        """Whether message `sequence` seems to be there. Gives no right to read it."""
        return self._words[self._slot(sequence) // WORD] == sequence

    def label(self, sequence: int) -> tuple[int, int]:
        """(length, kind) of message `sequence`, for a reader that holds its token.

        Raises:
            QueueCorruptError: The slot holds something else.
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
        """Process id of the party, or 0 before it has attached."""
        return self._words[_party(party) // WORD + 1]

    def set_activity(self, party: int, text: str) -> None:
        raw = text.encode()[: _ACTIVITY_BYTES - 1] + b"\0"
        start = _party(party) + LINE
        self.segment.view[start : start + len(raw)] = raw

    def activity(self, party: int) -> str:
        """What the party last said it was doing; "" when it never did."""
        start = _party(party) + LINE
        raw = bytes(self.segment.view[start : start + _ACTIVITY_BYTES])
        return raw.partition(b"\0")[0].decode(errors="replace")

    def check_integrity(self) -> None:
        """Raises QueueCorruptError if counts contradict each other. For a ring at rest."""
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
    return LINE + _PARTY_BYTES * party


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
