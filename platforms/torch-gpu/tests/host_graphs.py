"""Graphs of torch operations on the host, with the rules of CUDA graphs.

A replay runs the recorded operations again on the same tensors; values that the step's Python code read during the
capture stay constant. A capture computes no results: they are overwritten with NaN until the first replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mvllm.plugin_api import PlatformError
from tests.helpers.host_sync import ForbidHostReads, ForbidSynchronizingOps


@dataclass
class _Call:
    """A captured operation."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[torch.Tensor]

    @property
    def works_in_place(self) -> bool:
        return bool(self.function._schema.is_mutable)

    @property
    def computes(self) -> bool:
        """Whether it computes something; False if it returns only views of its arguments."""
        there = {_storage(tensor) for tensor in _tensors((self.args, self.kwargs))}
        return self.works_in_place or not all(_storage(result) in there for result in self.results)

    def run_again(self) -> None:
        again = self.function(*self.args, **self.kwargs)
        if not self.works_in_place:
            for old, new in zip(self.results, _tensors(again), strict=True):
                old.copy_(new)


class _Recorder(TorchDispatchMode):
    """Records operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append(_Call(func, args, kwargs or {}, _tensors(result)))
        return result


class HostGraphs:
    """GraphCapturer for `StepGraphBackend` on the host.

    Args:
        refuses: Text of the error that forbid_synchronization raises; None for no error.
        refuses_capture: Error that capture raises; None for no error.

    Attributes:
        captures, replays: Number of captures and of replays.
        tries: Number of calls of `capture`.
        is_active: Whether a replay, a capture or the run before a capture runs now, of any object.
    """

    is_active: ClassVar[bool] = False
    _recorder: ClassVar[_Recorder | None] = None

    def __init__(self, *, refuses: str | None = None, refuses_capture: BaseException | None = None) -> None:
        self._refuses = refuses
        self._refuses_capture = refuses_capture
        self.captures = self.replays = self.tries = 0

    @classmethod
    def record(cls, call: Any) -> None:
        """Adds work that is not an operation of torch to the capture that runs now, if any; `call` is like a _Call."""
        if cls._recorder is not None:
            cls._recorder.calls.append(call)

    def permit(self) -> None:
        """From now on nothing raises."""
        self._refuses = self._refuses_capture = None

    @contextmanager
    def forbid_synchronization(self) -> Iterator[None]:
        """Fails on operations that would make the host wait for the device."""
        with ForbidSynchronizingOps(), self.forbid_reads(), _active():
            yield
        if self._refuses is not None:
            raise PlatformError(self._refuses)

    def forbid_reads(self) -> AbstractContextManager[Any]:
        """Fails on reads of tensors of the device, which are tensors of the host here."""
        return ForbidHostReads(lambda tensor: False)

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        self.tries += 1
        if self._refuses_capture is not None:
            raise self._refuses_capture
        self.captures += 1
        with _active():
            with _Recorder() as recorder:
                HostGraphs._recorder = recorder
                try:
                    step()
                finally:
                    HostGraphs._recorder = None
            calls = [call for call in recorder.calls if call.computes]
            for call in calls:
                if not call.works_in_place:
                    for made in call.results:
                        made.fill_(torch.nan if made.is_floating_point() else 101)

        def replay() -> None:
            self.replays += 1
            with _active():
                for call in calls:
                    call.run_again()

        return replay


@contextmanager
def _active() -> Iterator[None]:
    HostGraphs.is_active = True
    try:
        yield
    finally:
        HostGraphs.is_active = False


def _tensors(things: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(things) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
