"""The suite's tests of memory figures on an allocator that keeps freed memory, as malloc does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mvllm.plugin_api import MemoryInfo
from mvllm_conformance.suite import test_dev_device as suite


class KeepingRuntime:
    """A device whose first tensors lie in memory that the process had already.

    Args:
        num_kept: How many tensors fit into that memory.
        counted: The share of further memory that the figures count.
    """

    def __init__(self, num_kept: int, counted: float = 1.0) -> None:
        self.num_kept, self.counted, self.num_made, self.peak = num_kept, counted, 0, 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.num_made += 1
        return torch.empty(shape, dtype=dtype, device="meta")

    def memory(self) -> MemoryInfo:
        used = int(max(0, self.num_made - self.num_kept) * suite.BIG * self.counted)
        self.peak = max(self.peak, used)
        return MemoryInfo(total=1 << 40, free=1 << 39, used_by_me=used, peak_by_me=self.peak)

    def nothing(self) -> None: ...

    synchronize = step_mark = reset_peak_memory = nothing


TESTS: Any = (
    suite.test_what_this_process_takes_is_counted_as_its_own,
    suite.test_peak_follows_an_allocation_that_is_gone_again,
)


@pytest.mark.parametrize("test", TESTS)
def test_memory_that_was_kept_is_no_fault(test: Any) -> None:
    for num_kept in (0, 1, 3):
        test(KeepingRuntime(num_kept))


@pytest.mark.parametrize("test", TESTS)
def test_memory_that_is_not_counted_is_one(test: Any) -> None:
    for runtime in (KeepingRuntime(9), KeepingRuntime(0, counted=0.5), KeepingRuntime(1, counted=0.5)):
        with pytest.raises(AssertionError, match="100,663,296 bytes"):
            test(runtime)
