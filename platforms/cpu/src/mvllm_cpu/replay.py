"""Steps without Python: a function over tensors is run once while its kernels are recorded, and from then on replayed.

A decode step is some hundred calls of kernels, and each costs Python microseconds to find its arguments; with one row
the whole step is some milliseconds of reading weights. So the first step of a shape writes down its calls, and later
steps of that shape are one call into the library that makes them all:

    function(ids, positions, plan)      norm(x, w, y)  linear(y, w, z)  attention(plan, z, keys, values, y)  ...
                                              │             │                    │
    where the pointers lie              intermediates   weights (fixed)     argument 2: this step's plan

Intermediate tensors are laid out anew in one arena that all recordings share, each place used again as soon as its
last reader is done. Arguments and the result are put in for each run.

Nobody has to promise that a function can be replayed. While it is recorded torch says which operations it runs: one
that computes, and is no kernel of ours, ends the matter. Then the recording is run over an arena filled with NaN
patterns and has to give the recorded result to the last bit, or is not used: work that nobody has seen would be missing
from it. What cannot be replayed is called as it is.

Ranks add up their parts within the library, too. Where a rank does not come, the replay stops at that call and comes
back to Python, which sees whether the rank is alive, and goes on with the same call.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mvllm.plugin_api import CompileBackend, get_logger
from mvllm_cpu import recording
from mvllm_cpu.recording import BlockingKernel, Call

logger = get_logger("mvllm.cpu.replay")

MOST_ROWS = 64
"""Steps of more rows compute for so long that what Python takes does not matter; they are not recorded."""

ALIGNMENT = 64
ARENA, RESULT, FIRST_ARGUMENT = 0, 1, 2


class _NotReplayable(Exception):
    """Why a function's calls cannot be replayed."""


class _Patch(ctypes.Structure):
    """`Patch` of csrc/program.cpp."""

    _fields_ = [("at", ctypes.c_int32), ("slot", ctypes.c_int32), ("offset", ctypes.c_int64)]


@dataclass
class _Buffer:
    """An intermediate tensor's memory, and the calls between which it is in use."""

    address: int
    size: int
    first: int
    last: int
    offset: int = -1


@dataclass
class _Program:
    """Recorded calls as the library takes them.

    Attributes:
        calls, slots, patches: As in csrc/program.cpp.
        waits: What to do where a call stops the program, by the calls' numbers.
        arena_bytes: Memory of its intermediate tensors.
        shape, dtype: Of its result.
        held: Whatever its fixed pointers point into.
    """

    calls: Any
    slots: Any
    patches: Any
    waits: dict[int, Callable[[], None]]
    arena_bytes: int
    shape: torch.Size
    dtype: torch.dtype
    held: list[Any] = field(default_factory=list)


class _Watch(TorchDispatchMode):
    """Sees torch's operations: keeps what they allocate, and says which of them compute."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, for a second, to keep it from looking at us."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith(("aten::empty", "aten::new_empty")):
            self.allocated.append(result)
        elif not (func.is_view or name in ("aten::detach", "aten::_unsafe_view")):
            recording.refuse(f"torch computes {name}")
        elif name == "aten::lift_fresh" or not _is_within(result, args):
            # Where no gradients are wanted, torch shows `contiguous`, `reshape` and `to` whole, copies or not.
            recording.refuse(f"torch makes a tensor with {name}")
        return result


def _is_within(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation's results lie in the memory of the tensors that it was given."""
    results = result if isinstance(result, list | tuple) else (result,)
    given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
    return all(r.untyped_storage().data_ptr() in given for r in results if isinstance(r, torch.Tensor))


class Replay(CompileBackend):
    """Records functions whose work is done by this package's kernels.

    Args:
        library: The kernels; without them, functions stay as they are.
    """

    def __init__(self, library: ctypes.CDLL | None) -> None:
        pointer, length = ctypes.c_void_p, ctypes.c_int64
        self._run: Any = None
        if library is not None:
            self._run = library.mvllm_cpu_program_run
            self._run.argtypes = (pointer, length, length, pointer, pointer, length, pointer)
            self._run.restype = length
        self._arena = torch.empty(0, dtype=torch.uint8)

    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """A callable that replays `function` where that can be done. Each shape is recorded on its own anyway."""
        return function if self._run is None else _Compiled(self, function)

    def needs_warm_up(self) -> bool:
        """No: a recording takes as long as two runs, is of one shape, and most shapes of a warm-up never come."""
        return False

    def arena(self, size: int) -> int:
        """Where `size` bytes for intermediate tensors begin; their contents are anyone's."""
        if self._arena.numel() < size + ALIGNMENT:
            self._arena = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        return -(-self._arena.data_ptr() // ALIGNMENT) * ALIGNMENT

    def poison_arena(self) -> None:
        """Fills the arena with NaNs of every dtype."""
        self._arena.fill_(0xFF)

    def run(self, program: _Program, arguments: tuple[Any, ...]) -> torch.Tensor:
        """Makes a program's calls for these arguments."""
        result = torch.empty(program.shape, dtype=program.dtype)
        bases = (ctypes.c_int64 * (FIRST_ARGUMENT + len(arguments)))(
            self.arena(program.arena_bytes), result.data_ptr(), *map(_base_of, arguments)
        )
        done, count, num_patches = 0, len(program.calls), len(program.patches)
        while True:
            done = self._run(program.calls, done, count, program.slots, program.patches, num_patches, bases)
            if done == count:
                return result
            program.waits[done]()
            num_patches = 0  # the first run has put everything in its place


class _Compiled:
    """One function and its recordings, by the shapes of its arguments."""

    def __init__(self, backend: Replay, function: Callable[..., Any]) -> None:
        self._backend = backend
        self._function = function
        self._programs: dict[Hashable, _Program | None] = {}

    def __call__(self, *args: Any) -> Any:
        """What the function returns for `args`: tensors, None, or plans that this platform's attention has made."""
        rows = next((arg.shape[0] for arg in args if isinstance(arg, torch.Tensor) and arg.dim()), MOST_ROWS + 1)
        if rows > MOST_ROWS:
            return self._function(*args)
        key = tuple(map(_key_of, args))
        program = self._programs.get(key, self)
        if program is None:
            return self._function(*args)
        if not isinstance(program, _Program):
            return self._record(key, args)
        return self._backend.run(program, args)

    def _record(self, key: Hashable, args: tuple[Any, ...]) -> Any:
        before = _copies(args)  # the function may work in place
        with _Watch() as watch:
            result, calls, refusal = recording.record(lambda: self._function(*args))
        self._programs[key] = None
        try:
            if refusal is not None:
                raise _NotReplayable(refusal)
            program = _program(calls, watch.allocated, result, args)
            self._backend.arena(program.arena_bytes)
            self._backend.poison_arena()
            again = self._backend.run(program, _copies(before))
            if not torch.equal(result.view(torch.uint8), again.view(torch.uint8)):
                self._function(*before)  # the keys and values that the recording has stored may be wrong too
                raise _NotReplayable("its kernels are not all of its work: the recording gives another result")
        except _NotReplayable as e:
            logger.debug("Steps of %s are not replayed: %s", key, e)
        else:
            self._programs[key] = program
        return result


def _copies(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, of tensors a copy with the same strides."""
    return tuple(
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a) if isinstance(a, torch.Tensor) else a
        for a in arguments
    )


def _key_of(argument: Any) -> Hashable:
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype
    # Rows behind a plan's tokens are padding, which attention treats apart.
    return type(argument), cast(Hashable, getattr(argument, "num_tokens", None))


def _base_of(argument: Any) -> int:
    """What pointers into an argument count from: where a tensor begins, or an attention plan's handle."""
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else int(argument.handle)


def _program(calls: list[Call], allocated: list[torch.Tensor], result: Any, arguments: tuple[Any, ...]) -> _Program:
    """Lays out the intermediate tensors of recorded calls, and names what changes from run to run.

    Raises:
        _NotReplayable: With the reason.
    """
    if not isinstance(result, torch.Tensor) or not result.is_contiguous():
        raise _NotReplayable("its result is not one contiguous tensor")
    if any(not isinstance(a, torch.Tensor | None) and not hasattr(a, "handle") for a in arguments):
        raise _NotReplayable("its arguments are not all tensors and attention plans")
    buffers = [_Buffer(t.data_ptr(), t.nbytes, len(calls), -1) for t in allocated if t.nbytes]
    inputs = [
        (_base_of(a), a.nbytes if isinstance(a, torch.Tensor) else 1, FIRST_ARGUMENT + i)
        for i, a in enumerate(arguments)
        if a is not None
    ]
    found: list[tuple[int, _Buffer | None, int, int]] = []  # place, buffer or None, slot, offset
    slots: list[int] = []
    held: list[Any] = []
    numbers: list[int] = []
    waits: dict[int, Callable[[], None]] = {}
    unknown: list[int] = []  # slots that want to know which weights are read next
    for number, (called, args) in enumerate(calls):
        if called.entry < 0:
            raise _NotReplayable(f"programs cannot call {called.name}")
        numbers.append(called.entry)
        if called.weight is not None:
            for at in unknown:
                slots[at] = args[called.weight]
            unknown.clear()
        if isinstance(called, BlockingKernel):
            waits[number] = called.check_peers
            unknown.append(len(slots) + called.ahead)
        for kind, value in zip(called.argtypes, args, strict=True):
            if kind is ctypes.c_void_p and isinstance(value, int) and value:
                _place(value, number, len(slots), buffers, inputs, found)
            slots.append(_bits(kind, value))
            held.append(getattr(value, "_obj", None))

    own = next((b for b in buffers if b.address == result.data_ptr()), None)
    if own is None or own.last < 0 or own.size != result.nbytes:
        raise _NotReplayable("its result is not what one of its kernels has written")
    arena_bytes = _lay_out([b for b in buffers if b is not own and b.last >= 0])
    patches = [
        (at, RESULT, offset)
        if buffer is own
        else (at, slot, offset)
        if buffer is None
        else (at, ARENA, buffer.offset + offset)
        for at, buffer, slot, offset in found
    ]
    return _Program(
        calls=(ctypes.c_int32 * len(numbers))(*numbers),
        slots=(ctypes.c_int64 * len(slots))(*slots),
        patches=(_Patch * len(patches))(*(_Patch(*patch) for patch in patches)),
        waits=waits,
        arena_bytes=arena_bytes,
        shape=result.shape,
        dtype=result.dtype,
        held=[thing for thing in held if thing is not None],
    )


def _place(
    address: int,
    number: int,
    at: int,
    buffers: list[_Buffer],
    inputs: list[tuple[int, int, int]],
    found: list[tuple[int, _Buffer | None, int, int]],
) -> None:
    """Adds to `found` what the pointer in slot `at`, an argument of call `number`, points into unless that is fixed."""
    for begin, size, slot in inputs:
        if begin <= address < begin + size:
            found.append((at, None, slot, address - begin))
            return
    for buffer in buffers:
        if buffer.address <= address < buffer.address + buffer.size:
            buffer.first, buffer.last = min(buffer.first, number), max(buffer.last, number)
            found.append((at, buffer, ARENA, address - buffer.address))
            return


def _lay_out(buffers: list[_Buffer]) -> int:
    """Gives each buffer the lowest place that is free while it is in use; returns the bytes that all of them take."""
    placed: list[_Buffer] = []
    end = 0
    for buffer in sorted(buffers, key=lambda b: b.first):
        offset = 0
        for other in sorted((b for b in placed if b.last >= buffer.first), key=lambda b: b.offset):
            if other.offset - offset >= buffer.size:
                break
            offset = max(offset, -(-(other.offset + other.size) // ALIGNMENT) * ALIGNMENT)
        buffer.offset = offset
        placed.append(buffer)
        end = max(end, offset + buffer.size)
    return end


def _bits(kind: Any, value: Any) -> int:
    """An argument as a program's slot holds it."""
    if kind is ctypes.c_float:
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    if hasattr(value, "_obj"):  # byref
        return ctypes.addressof(value._obj)
    return 0 if value is None else int(value)
