"""DeviceGraphs: captures the work that a step submits to a device, and replays it.

All graphs share one memory pool. This is correct because they run one after the other on one stream: between two graphs
the pool's memory is unused, except for tensors that are still referenced, which the pool does not reuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mvllm.plugin_api import PlatformError, get_logger
from mvllm_torch_gpu.device_module import CUDA, DeviceModule
from mvllm_torch_gpu.out_of_memory import is_out_of_memory

logger = get_logger("mvllm.torch_gpu.graphs")


class DeviceGraphs:
    """Captured graphs of one device.

    Args:
        device: The device.
        module: Torch's module for it.
    """

    def __init__(self, device: torch.device, module: DeviceModule = CUDA) -> None:
        self._device = device
        self._module = module
        self._pool: Any = None

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Runs `step` while it is recorded; returns its replay, which reads and writes the tensors that it used.

        Raises:
            PlatformError: The step cannot be captured.
        """
        api = self._module.api
        api.synchronize(self._device)
        api.empty_cache()  # the graphs' pool takes memory of its own
        if self._pool is None:
            self._pool = api.graph_pool_handle()
        graph = self._module.new_graph()
        stream = api.current_stream(self._device)
        try:
            with self._module.captures(graph, self._pool):
                step()
        except RuntimeError as e:
            # The error at the end of an aborted capture hides the cause, which is its context.
            for found in (e, e.__context__):
                if found is not None and is_out_of_memory(found):
                    raise found from None
            reason = str(e.__context__ or e).partition("\n")[0]
            raise PlatformError(f"The step cannot be captured in a graph: {reason}") from e
        finally:
            api.set_stream(stream)  # a capture that fails at its end leaves its own stream in place
        return _Replay(graph, step)

    @contextmanager
    def forbid_synchronization(self) -> Iterator[None]:
        """Context in which work that waits for the device fails, because it could not be captured.

        A step that has run in it has allocated one-time resources: compiled kernels, libraries' workspaces.

        Raises:
            PlatformError: The work has waited.
        """
        try:
            with self._module.forbids_waiting():
                yield
        except RuntimeError as e:
            if is_out_of_memory(e) or "synchroniz" not in str(e):
                raise
            raise PlatformError(f"The step waits for the device: {str(e).partition(chr(10))[0]}") from e


class _Replay:
    """Replays a graph, and keeps the step's tensors alive."""

    def __init__(self, graph: Any, step: Callable[[], Any]) -> None:
        self._graph = graph
        self._step = step

    def __call__(self) -> None:
        self._graph.replay()
