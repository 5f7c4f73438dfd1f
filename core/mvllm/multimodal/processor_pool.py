"""ProcessorPool: the processes that decode and process items, as few as the load needs.

    first process      starts with the first item, and stays
    other processes    start when an item has waited for PATIENCE seconds, and end after IDLE_SECONDS without one
    last of several    takes images and embeddings only, if the model takes videos or audio, too

One queue feeds all of them. A video may take a minute; images behind it wait for PATIENCE and the start of a process.
A process that cannot load the model's processor takes no items for RETRY_SECONDS. Others take them if one has worked.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future

from mvllm.errors import RequestError
from mvllm.executor.process.pipe_process import PipeProcess, PipeProcessError
from mvllm.logging import get_logger
from mvllm.messages.multimodal import EMBEDS
from mvllm.multimodal.processor_messages import PLACEHOLDERS, ItemJob, ItemResult, ProcessorStart

logger = get_logger(__name__)

ITEM_SECONDS = 60.0
"""Processor time for one item."""
WALL_SECONDS = 180.0
"""Longest time for one item, the start of the process included."""
PATIENCE = 1.0
"""Seconds that an item waits before another process starts for it."""
START_PATIENCE = 10.0
"""As PATIENCE, until the first process has answered: loading the model's processor takes seconds."""
IDLE_SECONDS = 60.0
"""Seconds after which a process behind the first one ends if it has nothing to do."""
RETRY_SECONDS = 30.0
"""Seconds for which items are refused after the model's processor could not be loaded."""

_QUICK = ("image", EMBEDS, PLACEHOLDERS)


class ProcessorPool:
    """Runs jobs in up to `num_processes` processes. Its threads end with `close`, or with the program.

    Args:
        module: What the processes run.
        start: Their first message.
        num_processes: Most processes.
        keeps_one_for_images: The last process of several takes no videos or audio.
    """

    def __init__(self, module: str, start: ProcessorStart, num_processes: int, *, keeps_one_for_images: bool) -> None:
        self._path = start.path
        self._processes = [PipeProcess(module, start) for _ in range(num_processes)]
        self._keeps_one_for_images = keeps_one_for_images and num_processes > 1
        self._changed = threading.Condition()
        self._queue: deque[_QueuedJob] = deque()
        self._first_answer: float | None = None
        self._load_failure: tuple[ItemResult, float] | None = None  # and until when it is the answer
        self._has_worked = False
        self._off_until = [0.0] * num_processes
        self._is_closed = False
        # Each process dies with the thread that started it, so every process has one.
        for number in range(num_processes):
            threading.Thread(target=self._serve, args=(number,), name=f"item-processor-{number}", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        return [pid for process in self._processes if (pid := process.pid) is not None]

    def run(self, job: ItemJob) -> ItemResult:
        """Runs a job. Blocks; callable in any thread.

        Raises:
            RequestError: It has failed.
        """
        queued = _QueuedJob(job)
        with self._changed:
            if self._is_closed:
                raise RequestError("The engine is shutting down.")
            result = self._known_failure(job)
            if result is None:
                self._queue.append(queued)
                self._changed.notify_all()
        if result is None:
            result = queued.result.result()
        if result.error is not None:
            raise RequestError(result.error, parameter=result.parameter)
        return result

    def close(self) -> None:
        """Ends threads and processes. Idempotent."""
        with self._changed:
            self._is_closed = True
            waiting = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for process in self._processes:
            process.close()
        for queued in waiting:
            queued.result.set_result(ItemResult(error="The engine is shutting down."))

    def _serve(self, number: int) -> None:
        """The thread of a process."""
        process = self._processes[number]
        while (queued := self._take(number, process)) is not None:
            try:
                result = self._run(process, queued.job)
                if result.is_load_failure:
                    if self._pass_on(number, queued, result):
                        continue
                    result = self._note_load_failure(result)
                queued.result.set_result(result)
            except BaseException as e:  # noqa: BLE001  (raised where the job was sent)
                queued.result.set_exception(e)
            with self._changed:
                if self._first_answer is None:
                    self._first_answer = time.monotonic()
                    self._changed.notify_all()

    def _take(self, number: int, process: PipeProcess) -> _QueuedJob | None:
        """Waits for the next job of a process; None after `close`."""
        idle_since = time.monotonic()
        with self._changed:
            while not self._is_closed:
                now, runs = time.monotonic(), number == 0 or process.pid is not None
                queued = self._next_job(number)
                wait: float | None = None
                if queued is not None:
                    starts_at = now if runs else self._starts_process_at(queued)
                    wait = max(starts_at, self._off_until[number]) - now
                    if wait <= 0:
                        self._queue.remove(queued)
                        return queued
                elif number and runs:
                    wait = idle_since + IDLE_SECONDS - now
                    if wait <= 0:
                        process.kill()
                        continue
                self._changed.wait(wait)
        return None

    def _next_job(self, number: int) -> _QueuedJob | None:
        return next((each for each in self._queue if self._takes(number, each.job)), None)

    def _takes(self, number: int, job: ItemJob) -> bool:
        is_for_images = self._keeps_one_for_images and number == len(self._processes) - 1
        return not is_for_images or job.source.modality in _QUICK

    def _starts_process_at(self, queued: _QueuedJob) -> float:
        if self._first_answer is None:
            return queued.since + START_PATIENCE
        return max(queued.since, self._first_answer) + PATIENCE

    def _run(self, process: PipeProcess, job: ItemJob) -> ItemResult:
        with self._changed:
            failure = self._known_failure(job)
        if failure is not None:
            return failure
        try:
            result = process.run(job, ItemResult, WALL_SECONDS)
        except PipeProcessError as e:
            modality = job.source.modality
            return ItemResult(error=_FAILURES[e.reason].format(modality), parameter="multi_modal_data")
        if result.is_last:
            process.kill()
        if result.error is None and job.source.modality != EMBEDS:
            self._has_worked = True
        return result

    def _known_failure(self, job: ItemJob) -> ItemResult | None:
        """The answer to a job while the model's processor is known not to load."""
        if self._load_failure is None or job.source.modality == EMBEDS:
            return None
        failure, until = self._load_failure
        return failure if time.monotonic() < until else None

    def _pass_on(self, number: int, queued: _QueuedJob, result: ItemResult) -> bool:
        """Leaves a job to another process if the processor could be loaded once; False if no other may take it."""
        with self._changed:
            now = time.monotonic()
            self._off_until[number] = now + RETRY_SECONDS
            others = (until <= now and self._takes(i, queued.job) for i, until in enumerate(self._off_until))
            if self._is_closed or not self._has_worked or not any(others):
                self._off_until = [0.0] * len(self._processes)  # the caller refuses items, but not embeddings
                self._changed.notify_all()
                return False
            self._queue.appendleft(queued)
            self._changed.notify_all()
        logger.warning("%s Other processes have loaded it, and take the items.", result.error)
        return True

    def _note_load_failure(self, result: ItemResult) -> ItemResult:
        """Remembers for a while that the model's processor cannot be loaded, which takes seconds to find out.

        The process has ended: the next one sees packages that were installed meanwhile.
        """
        logger.warning("%s Requests with items try again after %g s.", result.error, RETRY_SECONDS)
        error = (result.error or "").replace(self._path, "the model's folder")  # clients need not know where it is
        shown = ItemResult(error=f"{error} It is tried again after {RETRY_SECONDS:g} s.", parameter=result.parameter)
        with self._changed:
            self._load_failure = shown, time.monotonic() + RETRY_SECONDS
        return shown


class _QueuedJob:
    def __init__(self, job: ItemJob) -> None:
        self.job = job
        self.since = time.monotonic()
        self.result: Future[ItemResult] = Future()


_FAILURES = {
    "time": f"Decoding and processing the {{}} takes more than {ITEM_SECONDS:g} s.",
    "memory": "The {} cannot be decoded: the decoder crashed, or needs more memory than allowed.",
    "timeout": f"Decoding and processing the {{}} took longer than {WALL_SECONDS:g} s; try again.",
    "killed": "The process that decodes the {} was killed twice while it worked on it; try again.",
    "closed": "The engine is shutting down; the {} was not processed.",
}
