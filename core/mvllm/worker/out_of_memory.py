"""Out-of-memory errors in the user's terms, and an agreement among ranks on whether a failed step can be dropped.

A rank that runs out of memory within a step leaves the others waiting in a collective, unless they have failed too.
Ranks that share layers do the same work in the same order, and mostly fail at the same operation. So a failed rank
asks the others whether they have failed in the same step, and waits for a short time; a rank that computes, or waits
in a collective, does not answer. When all have failed, each synchronizes its device and notifies the others: every
collective is complete then, and the next step begins on all ranks in the same state.

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
def out_of_memory_as(kind: type[MvllmError], what: str, remedy: str, *, where: str = "device") -> Iterator[None]:
    """Raises `kind` with an explanation if the allocation of `what` fails.

    Allocators raise many kinds of RuntimeError.
    """
    try:
        yield
    except MvllmError:
        raise
    except (MemoryError, RuntimeError) as e:
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise kind(f"{what} cannot be allocated on the {where}: {reason.rstrip('.')}. {remedy}") from e


@contextmanager
def step_out_of_memory_error(scheduler: SchedulerConfig, runtime: DeviceRuntime) -> Iterator[None]:
    """Names the settings to change if a step runs out of memory.

    Raises:
        StepMemoryError: Replaces an error that the runtime recognizes as an allocator's.
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
    """Whether every rank of the group has failed in `step` and its device is idle. Called by each failed rank.

    Args:
        group: Ranks whose collectives within a step need all of them.
        runtime: This rank's device.
        step: Number of the plan.
        seconds: How long to wait for the others' answers, in each of the two exchanges.
    """
    if group.world_size == 1:
        return True
    if not _all_ranks_sent(group, f"{step} failed", seconds):
        return False
    runtime.synchronize()
    return _all_ranks_sent(group, f"{step} over", seconds)


def _all_ranks_sent(group: GroupCoordinator, word: str, seconds: float) -> bool:
    """Sends a word to the other ranks, and returns whether all of them send the same word in time.

    Without an answer a thread keeps waiting: the engine must end then.
    """
    others = [rank for rank in range(group.world_size) if rank != group.rank_in_group]
    received: list[str] = []

    def exchange() -> None:
        try:
            group.cpu_group.send(word.encode(), *others)
            for rank in others:
                received.append(group.cpu_group.receive(rank).decode(errors="replace"))
        except (RuntimeError, OSError, ValueError) as e:  # errors of any transport: a rank has ended
            logger.debug("Another rank cannot be reached: %s", e)

    thread = threading.Thread(target=exchange, name="mvllm-memory-agreement", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive() and received == [word] * len(others)
