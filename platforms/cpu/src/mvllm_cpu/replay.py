"""Step replay: a function over tensors runs once while its kernel calls are recorded; later calls replay the record.

A decode step is some hundred kernel calls, and Python spends microseconds on the arguments of each; with one row the
whole step takes a few milliseconds. So the first step of a shape records its calls, and later steps of that shape
execute them all with one call into the library:

    function(ids, positions, step)      norm(x, w, y)  linear(y, w, z)  attention(step, z, keys, values, y)  ...
                                              │             │                    │
    where the pointers point            intermediates   weights (fixed)     argument 2: this step's metadata

Intermediate tensors are placed in one arena that all recordings of a thread share; memory is reused after a tensor's
last reader. Addresses of arguments and of the result are patched for each run, so one thread at a time runs a function;
threads that run different functions, of different engines, do not wait for each other.

Whether a function can be replayed is detected. While it is recorded, torch reports its operations; kernels compute
some of them (`recordable_torch_ops.py`), and any other operation that computes makes the record incomplete. Then the
record is executed with an arena full of NaN patterns and must reproduce the recorded result bit for bit; otherwise work
is missing from it, and it is not used. Functions that cannot be replayed are called directly.

The states of sequences are the exception to repeated runs: a step may read the state slot that it writes. So a
function with states is recorded and validated with write slots -1, and runs once more to write them.

All-reduces over ranks are kernels, too. If a rank is late, the replay stops at that call and returns to Python, which
checks whether the rank is alive, and resumes with the same call.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mvllm.plugin_api import CompileBackend, get_logger
from mvllm_cpu import recording
from mvllm_cpu.recordable_torch_ops import RecordableTorchOps
from mvllm_cpu.recording import BlockingKernel, Call

logger = get_logger("mvllm.cpu.replay")

MOST_ROWS = 64
"""Steps with more rows are not recorded: their Python overhead is negligible."""

MOST_PATCHES = 256
"""Likewise for encoders. Recording keeps the intermediates of all layers until the program is built."""
MOST_ENCODER_SHAPES = 8
"""Recordings of an encoder that are kept: those used last."""

ALIGNMENT = 64
ARENA, RESULT, FIRST_ARGUMENT = 0, 1, 2


class _NotReplayable(Exception):
    """Why a function's calls cannot be replayed."""


class _Patch(ctypes.Structure):
    """`Patch` of csrc/program.cpp."""

    _fields_ = [("at", ctypes.c_int32), ("base", ctypes.c_int32), ("offset", ctypes.c_int64)]


@dataclass
class _Buffer:
    """Memory of an intermediate tensor, and the first and last call that use it."""

    address: int
    size: int
    first: int
    last: int
    offset: int = -1


@dataclass
class _Program:
    """Recorded calls in the library's format.

    Attributes:
        calls, words, patches: As in csrc/program.cpp.
        waits: By index of a call that may time out: the function to call before it is resumed.
        arena_bytes: Size of its intermediate tensors.
        shape, dtype: Those of its result.
        held: Objects that own the memory that its fixed pointers address.
    """

    calls: Any
    words: Any
    patches: Any
    waits: dict[int, Callable[[], None]]
    arena_bytes: int
    shape: torch.Size
    dtype: torch.dtype
    held: list[Any] = field(default_factory=list)


class _OperationRecorder(TorchDispatchMode):
    """Collects the tensors that torch's operations allocate, and reports operations that no kernel computes.

    Args:
        torch_ops: Kernels for operations of torch.
    """

    def __init__(self, torch_ops: RecordableTorchOps) -> None:
        super().__init__()
        self._torch_ops = torch_ops
        self.allocated: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Prevents torch from importing its compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        computed = self._torch_ops.compute(name, args, kwargs)
        if computed is not None:
            self.allocated.append(computed)
            return computed
        result = func(*args, **(kwargs or {}))
        if name.startswith(("aten::empty", "aten::new_empty")):
            self.allocated.append(result)
        # Without gradients, torch reports `contiguous`, `reshape` and `to` as one operation, copy or not.
        elif not _is_within(result, args) and (copied := self._torch_ops.copy(name, args, result)) is not None:
            self.allocated.append(copied)
            return copied
        elif not (func.is_view or name in ("aten::detach", "aten::_unsafe_view")):
            recording.refuse(f"torch computes {name}")
        elif name == "aten::lift_fresh" or not _is_within(result, args):
            recording.refuse(f"torch makes a tensor with {name}")
        return result


def _is_within(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation's results share the memory of its arguments."""
    results = result if isinstance(result, list | tuple) else (result,)
    storages = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
    return all(r.untyped_storage().data_ptr() in storages for r in results if isinstance(r, torch.Tensor))


class _Arena(threading.local):
    """The memory of a thread's intermediate tensors."""

    memory = torch.empty(0, dtype=torch.uint8)


class Replay(CompileBackend):
    """Compile backend that records and replays functions whose work is done by this package's kernels.

    Args:
        library: The kernels; without them, functions are returned unchanged.
    """

    def __init__(self, library: ctypes.CDLL | None) -> None:
        pointer, length = ctypes.c_void_p, ctypes.c_int64
        self._run: Any = None
        if library is not None:
            self._run = library.mvllm_cpu_program_run
            self._run.argtypes = (pointer, length, length, pointer, pointer, length, pointer)
            self._run.restype = length
            self.torch_ops = RecordableTorchOps(library)
        self._arena = _Arena()

    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """A callable that replays `function` if possible. Each shape is recorded separately, dynamic or not."""
        return function if self._run is None else _Compiled(self, function)

    def compile_encoder(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """Replays `function` for the numbers of inputs that occur more than once, if the inputs are small."""
        return None if self._run is None else _CompiledEncoder(self, function)

    def needs_warm_up(self) -> bool:
        """False: recording costs two runs per shape, and most shapes of a warm-up never occur."""
        return False

    def arena(self, size: int) -> int:
        """Address of `size` bytes for this thread's intermediate tensors, with undefined contents."""
        memory = self._arena.memory
        if memory.numel() < size + ALIGNMENT:
            memory = self._arena.memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        return -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT

    def poison_arena(self) -> None:
        """Fills this thread's arena with NaNs of every dtype."""
        self._arena.memory.fill_(0xFF)

    def run(self, program: _Program, arguments: tuple[Any, ...]) -> torch.Tensor:
        """Executes a program's calls for these arguments. No other thread may run the program meanwhile."""
        result = torch.empty(program.shape, dtype=program.dtype)
        given = list(map(_base_of, _addressed(arguments)))
        bases = (ctypes.c_int64 * (FIRST_ARGUMENT + len(given)))(
            self.arena(program.arena_bytes), result.data_ptr(), *given
        )
        done, count, num_patches = 0, len(program.calls), len(program.patches)
        while True:
            done = self._run(program.calls, done, count, program.words, program.patches, num_patches, bases)
            if done == count:
                return result
            program.waits[done]()
            num_patches = 0  # the first run has applied all patches


class _Compiled:
    """One function and its recordings, by the shapes of its arguments.

    Attributes:
        refusals: Why shapes are not replayed.
    """

    def __init__(self, backend: Replay, function: Callable[..., Any]) -> None:
        self._backend = backend
        self._function = function
        self._programs: dict[Hashable, _Program | None] = {}
        self._lock = threading.RLock()  # guards the programs, whose arguments a run patches
        self.refusals: dict[Hashable, str] = {}

    def __call__(self, *args: Any) -> Any:
        """Calls or replays the function. `args`: tensors, None, this platform's attention metadata, or state slots."""
        rows = next((arg.shape[0] for arg in args if isinstance(arg, torch.Tensor) and arg.dim()), MOST_ROWS + 1)
        if rows > MOST_ROWS:
            return self._function(*args)
        key = tuple(map(_key_of, args))
        with self._lock:
            program = self._programs.get(key, self)
            if isinstance(program, _Program):
                return self._backend.run(program, args)
            if program is not None:
                return self._record(key, args)
        return self._function(*args)

    def _record(self, key: Hashable, args: tuple[Any, ...]) -> Any:
        before = _copies(args)  # the function may modify its arguments
        has_slots, trial = any(map(_has_slots, args)), _without_state_writes(args)
        with _OperationRecorder(self._backend.torch_ops) as recorder:
            result, calls, held, refusal = recording.record(lambda: self._function(*trial))
        self._programs[key] = None
        try:
            if refusal is not None:
                raise _NotReplayable(refusal)
            program = _program(calls, recorder.allocated, result, trial)
            program.held += held
            self._backend.arena(program.arena_bytes)
            self._backend.poison_arena()
            again = self._backend.run(program, _without_state_writes(_copies(before)))
            if not torch.equal(result.view(torch.uint8), again.view(torch.uint8)):
                if not has_slots:
                    self._function(*before)  # the replay may have stored wrong keys and values
                raise _NotReplayable("its kernels are not all of its work: the replay gives another result")
        except _NotReplayable as e:
            self.refusals[key] = str(e)
            logger.debug("Steps of %s are not replayed: %s", key, e)
        else:
            self._programs[key] = program
        return self(*before) if has_slots else result


class _CompiledEncoder:
    """An encoder and its recordings, by the number of inputs: those of the numbers used last."""

    def __init__(self, backend: Replay, function: Callable[..., Any]) -> None:
        self._backend, self._function = backend, function
        self._recordings: OrderedDict[int, _Compiled | None] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, inputs: torch.Tensor) -> Any:
        """Calls or replays the function for inputs [n, rows of an input, ...]."""
        count = len(inputs)
        if inputs.shape[0] * inputs.shape[1] > MOST_PATCHES:
            return self._function(inputs)
        with self._lock:
            found = self._recorded(count)
        return self._function(inputs) if found is None else found(inputs)

    def _recorded(self, count: int) -> _Compiled | None:
        """The recordings of a number of inputs; None at its first occurrence, since one run would only be slower."""
        if count not in self._recordings:
            self._recordings[count] = None
            if len(self._recordings) > MOST_ENCODER_SHAPES:
                self._recordings.popitem(last=False)
            return None
        self._recordings.move_to_end(count)
        found = self._recordings[count]
        if found is None:
            found = self._recordings[count] = _Compiled(self._backend, self._function)
        return found


def _copies(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with tensors copied (same strides)."""
    return tuple(
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a) if isinstance(a, torch.Tensor) else a
        for a in arguments
    )


def _key_of(argument: Any) -> Hashable:
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype
    if _has_slots(argument):
        return type(argument), len(argument.read_slots), argument.max_query_len == 1
    # Rows after the metadata's tokens are padding, which attention treats differently.
    return type(argument), cast(Hashable, getattr(argument, "num_tokens", None))


def _has_slots(argument: Any) -> bool:
    """Whether an argument holds the state slots of a step, as tensors."""
    return hasattr(argument, "write_slots")


def _without_state_writes(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with write slots -1: the function gives the same result and leaves the states unchanged."""
    return tuple(
        dataclasses.replace(a, write_slots=torch.full_like(a.write_slots, -1)) if _has_slots(a) else a
        for a in arguments
    )


def _addressed(arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments whose addresses calls use: state slots are three tensors."""
    found: list[Any] = []
    for a in arguments:
        found += [a.query_start_loc, a.read_slots, a.write_slots] if _has_slots(a) else [a]
    return found


def _base_of(argument: Any) -> int:
    """Base address of an argument: a tensor's data, or the handle of attention metadata."""
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else int(argument.handle)


def _program(calls: list[Call], allocated: list[torch.Tensor], result: Any, arguments: tuple[Any, ...]) -> _Program:
    """Builds a program: places the intermediate tensors of recorded calls and lists the addresses to patch.

    Raises:
        _NotReplayable: With the reason.
    """
    if not isinstance(result, torch.Tensor) or not result.is_contiguous():
        raise _NotReplayable("its result is not one contiguous tensor")
    arguments = tuple(_addressed(arguments))
    if any(not isinstance(a, torch.Tensor | None) and not hasattr(a, "handle") for a in arguments):
        raise _NotReplayable("its arguments are not all tensors, attention metadata and state slots")
    buffers = [_Buffer(t.data_ptr(), t.nbytes, len(calls), -1) for t in allocated if t.nbytes]
    inputs = [
        (_base_of(a), a.nbytes if isinstance(a, torch.Tensor) else 1, FIRST_ARGUMENT + i)
        for i, a in enumerate(arguments)
        if a is not None
    ]
    found: list[tuple[int, _Buffer | None, int, int]] = []  # place, buffer or None, base, offset
    words: list[int] = []
    held: list[Any] = []
    numbers: list[int] = []
    waits: dict[int, Callable[[], None]] = {}
    unknown: list[int] = []  # words for the address of the next weight that is read
    for number, (called, args) in enumerate(calls):
        if called.entry < 0:
            raise _NotReplayable(f"programs cannot call {called.name}")
        numbers.append(called.entry)
        if called.weight is not None:
            for at in unknown:
                words[at] = args[called.weight]
            unknown.clear()
        if isinstance(called, BlockingKernel):
            waits[number] = called.check_peers
            unknown.append(len(words) + called.ahead)
        for kind, value in zip(called.argtypes, args, strict=True):
            if kind is ctypes.c_void_p and isinstance(value, int) and value:
                _place(value, number, len(words), buffers, inputs, found)
            words.append(_bits(kind, value))
            held.append(getattr(value, "_obj", None))

    output = next((b for b in buffers if b.address == result.data_ptr()), None)
    if output is None or output.last < 0 or output.size != result.nbytes:
        raise _NotReplayable("its result was not written by one of its kernels")
    arena_bytes = _lay_out([b for b in buffers if b is not output and b.last >= 0])
    patches = [
        (at, RESULT, offset)
        if buffer is output
        else (at, base, offset)
        if buffer is None
        else (at, ARENA, buffer.offset + offset)
        for at, buffer, base, offset in found
    ]
    return _Program(
        calls=(ctypes.c_int32 * len(numbers))(*numbers),
        words=(ctypes.c_int64 * len(words))(*words),
        patches=(_Patch * len(patches))(*(_Patch(*patch) for patch in patches)),
        waits=waits,
        arena_bytes=arena_bytes,
        shape=result.shape,
        dtype=result.dtype,
        held=[each for each in held if each is not None],
    )


def _place(
    address: int,
    number: int,
    at: int,
    buffers: list[_Buffer],
    inputs: list[tuple[int, int, int]],
    found: list[tuple[int, _Buffer | None, int, int]],
) -> None:
    """Appends to `found` the argument or buffer that the pointer in word `at` of call `number` points into, if any."""
    for begin, size, base in inputs:
        if begin <= address < begin + size:
            found.append((at, None, base, address - begin))
            return
    for buffer in buffers:
        if buffer.address <= address < buffer.address + buffer.size:
            buffer.first, buffer.last = min(buffer.first, number), max(buffer.last, number)
            found.append((at, buffer, ARENA, address - buffer.address))
            return


def _lay_out(buffers: list[_Buffer]) -> int:
    """Places each buffer at the lowest offset that is free during its use; returns the total size in bytes."""
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
    """An argument as a word of 64 bits."""
    if kind is ctypes.c_float:
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    if hasattr(value, "_obj"):  # byref
        return ctypes.addressof(value._obj)
    return 0 if value is None else int(value)
