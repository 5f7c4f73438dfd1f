"""Graphs of a device's work: what a step submits, recorded once and submitted again as one piece.

All graphs share one pool of memory. That is right because they run one after the other on one stream: what lies in the
pool between two of them is nobody's, except for tensors that somebody still holds, which the pool does not reuse.

Not run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mvllm.plugin_api import GraphBackend, PlatformError, get_logger

logger = get_logger("mvllm.torch_gpu.graphs")


class DeviceGraphs(GraphBackend):
    """The graphs of one device.

    Args:
        device: It.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._bytes = 0

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # so that what the allocator holds more afterwards is the graph's
        before = torch.cuda.memory_reserved(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            # Other threads (NCCL's watchdog is one) may ask the driver for things that a capture must not.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            # What is said of the end of a capture that was broken off is not why.
            reason = str(e.__context__ or e).partition("\n")[0]
            raise PlatformError(f"The step cannot be captured in a graph: {reason}") from e
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails at its end leaves its own stream in place
        self._bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return _Replay(graph, step)

    def memory_bytes(self) -> int:
        return self._bytes

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Work done in here fails if it waits for the device: that could not be captured.

        What it needs once (compiled kernels, libraries' workspaces) is there afterwards.

        Raises:
            PlatformError: It has waited.
        """
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            if "synchroniz" not in str(e):
                raise
            raise PlatformError(f"The step waits for the device: {str(e).partition(chr(10))[0]}") from e
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _Replay:
    """Submits a graph again, and keeps what it reads and writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, step: Callable[[], Any]) -> None:
        self._graph = graph
        self._step = step

    def __call__(self) -> None:
        self._graph.replay()
