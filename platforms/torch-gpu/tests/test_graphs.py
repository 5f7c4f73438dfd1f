"""State after a failed capture, with replacements of torch's device functions; a real capture needs a device."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from mvllm.plugin_api import PlatformError
from mvllm_torch_gpu.graphs import DeviceGraphs


@pytest.fixture
def streams(monkeypatch):
    """A list with the name of the current stream, which the replaced torch functions read and set."""
    current = ["the step's"]

    @contextmanager
    def capture(graph, pool, capture_error_mode):
        current[0] = "the capture's"
        failed = None
        try:
            yield
        except RuntimeError as e:
            failed = e
        if failed is not None:  # like torch: the end of an invalid capture fails before the stream is restored
            try:
                raise failed
            except RuntimeError:
                raise RuntimeError("operation failed due to a previous error during capture") from None
        current[0] = "the step's"

    for name, function in {
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "memory_reserved": lambda device: 0,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": object,
        "graph": capture,
        "current_stream": lambda device: current[0],
        "set_stream": lambda stream: current.__setitem__(0, stream),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return current


def test_a_failed_capture_restores_the_stream_and_raises_the_reason(streams):
    def step():
        assert streams == ["the capture's"]
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    with pytest.raises(PlatformError, match=r"in a graph: operation not permitted when stream is capturing$"):
        DeviceGraphs(torch.device("cuda", 0)).capture(step)
    assert streams == ["the step's"]


def test_a_capture_without_memory_restores_the_stream(streams):
    def step():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises((PlatformError, torch.OutOfMemoryError), match="out of memory"):
        DeviceGraphs(torch.device("cuda", 0)).capture(step)
    assert streams == ["the step's"]
