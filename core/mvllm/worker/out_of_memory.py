"""Steps and allocations that find no memory: what is said, in the user's terms, and whether ranks can go on.

A rank that has no memory in the middle of a step leaves the others in a collective that it will never join, unless they
have none either: ranks that share layers do the same work in the same order, and mostly fail in the same place. So a
rank that fails asks the others whether they have failed in the same step, and waits for their answers, but not for
long: one that computes, or waits for this one, does not answer. When all have, what they had submitted to their devices
has to come to its end, which they tell each other as well: every sum among them is then complete, and the next step
begins on all of them at the same place.

    rank 0   step 7 ── no memory ── "7 failed" ─┐         ┌─ synchronize ── "7 over" ─┐        ┌─ step 8
    rank 1   step 7 ──── no memory ─ "7 failed" ┴─ both ──┴─ synchronize ─── "7 over" ┴─ both ─┴─ step 8

Otherwise the engine ends, as it does when a rank dies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mvllm.config.engine_config import SchedulerConfig
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import MvllmError, StepMemoryError
from mvllm.logging import get_logger
from mvllm.platform.runtime import DeviceRuntime

logger = get_logger(__name__)


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
def step_out_of_memory_error(scheduler: SchedulerConfig, runtime: DeviceRuntime) -> Iterator[None]:
    """Says which settings help a step that has found no memory.

    Raises:
        StepMemoryError: In the place of an error that the runtime knows as an allocator's.
    """
    try:
        yield
    except MvllmError:
        raise
    except Exception as e:
        if not runtime.is_out_of_memory(e):
            raise
        reason = (str(e) or type(e).__name__).splitlines()[0].rstrip(".")
        raise StepMemoryError(
            f"A step does not fit into the device's memory: {reason}. Lower max_num_batched_tokens (now "
            f"{scheduler.max_num_batched_tokens}) or max_num_seqs (now {scheduler.max_num_seqs}), which makes steps "
            "smaller, or memory_utilization, which leaves them more room."
        ) from e


def all_ranks_failed_step(group: GroupCoordinator, runtime: DeviceRuntime, step: int, seconds: float) -> bool:
    """Whether every rank of the group has failed in `step` and has nothing under way. Called by each that has failed.

    Args:
        group: Ranks whose collectives within a step are sums and gathers that none completes alone.
        runtime: This rank's device.
        step: Number of the plan.
        seconds: How long to wait for the others' answers, each of the two times.
    """
    if group.world_size == 1:
        return True
    if not _all_ranks_sent(group, f"{step} failed", seconds):
        return False
    runtime.synchronize()
    return _all_ranks_sent(group, f"{step} over", seconds)


def _all_ranks_sent(group: GroupCoordinator, word: str, seconds: float) -> bool:
    """Tells the other ranks a word, and returns whether all of them say the same in time.

    One that says nothing keeps a thread waiting: the engine is to end then.
    """
    others = [rank for rank in range(group.world_size) if rank != group.rank_in_group]
    heard: list[str] = []

    def talk() -> None:
        try:
            group.cpu_group.send(word.encode(), *others)
            for rank in others:
                heard.append(group.cpu_group.receive(rank).decode(errors="replace"))
        except (RuntimeError, OSError, ValueError) as e:  # of whatever carries the bytes: a rank is gone
            logger.debug("Another rank cannot be asked: %s", e)

    thread = threading.Thread(target=talk, name="mvllm-memory-agreement", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive() and heard == [word] * len(others)
