"""Allocators' errors in the user's terms: what found no memory, and which setting helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mvllm.config.engine_config import SchedulerConfig
from mvllm.errors import MvllmError, StepMemoryError


@contextmanager
def out_of_memory_as(kind: type[MvllmError], what: str, remedy: str) -> Iterator[None]:
    """Says in the user's terms that `what` found no memory: allocators raise RuntimeErrors of many wordings."""
    try:
        yield
    except MvllmError:
        raise
    except (MemoryError, RuntimeError) as e:
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise kind(f"{what} cannot be allocated on the device: {reason.rstrip('.')}. {remedy}") from e


@contextmanager
def naming_limits(scheduler: SchedulerConfig) -> Iterator[None]:
    """Says which settings help a step that has found no memory.

    Raises:
        StepMemoryError: In the place of an allocator's error.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as e:
        reason = (str(e) or type(e).__name__).splitlines()[0].rstrip(".")
        raise StepMemoryError(
            f"A step does not fit into the device's memory: {reason}. Lower max_num_batched_tokens (now "
            f"{scheduler.max_num_batched_tokens}) or max_num_seqs (now {scheduler.max_num_seqs}), which makes steps "
            "smaller, or memory_utilization, which leaves them more room."
        ) from e
