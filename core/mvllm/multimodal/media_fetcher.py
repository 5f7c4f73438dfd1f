"""MediaFetcher: fetches the URLs of clients in threads of its own, so that a host that does not answer delays few.

A fetch holds its thread for as long as its host likes, up to `fetch_timeout`. So a server fetches before a prompt takes
anything that others wait for: memory for its items, or a thread that decodes. And nobody has all threads:

    client           MAX_PER_CLIENT fetches at once, and no more than are left for others
    client, host     MAX_PER_HOST fetches at once: one silent host leaves room for a client's others
    memory           no prompt begins to fetch while others hold `max_bytes` that they have fetched
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from mvllm.errors import RequestError

NUM_THREADS = 64
MAX_PER_CLIENT = 16
MAX_PER_HOST = 8

current_client: ContextVar[Hashable] = ContextVar("mvllm.client", default=None)
"""Whose request runs in this context; None for the program's own, which has the limit NUM_THREADS only."""


class FetchGroup:
    """The fetches of one call.

    Attributes:
        num_bytes: Bytes of their contents so far.
    """

    def __init__(self, fetcher: MediaFetcher, client: Hashable) -> None:
        self._fetcher = fetcher
        self.client = client
        self.num_bytes = 0
        self.has_started = False
        self.has_ended = False

    def end(self) -> None:
        """Its contents are no longer held. Idempotent."""
        self._fetcher.end(self)


@dataclass
class _Job:
    url: str
    group: FetchGroup
    future: Future[bytes] = field(default_factory=Future)

    @property
    def host(self) -> Hashable:
        """Client and host; URLs that are not valid are not fetched, and have none."""
        try:
            return self.group.client, urlsplit(self.url).hostname
        except ValueError:
            return self.group.client, None


class MediaFetcher:
    """Fetches URLs. May be used from any thread.

    Args:
        fetch: Returns the content of a URL. Blocks.
        max_bytes: Bytes of contents beyond which no further prompt begins to fetch.
    """

    def __init__(self, fetch: Callable[[str], bytes], max_bytes: int) -> None:
        self._fetch = fetch
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="fetch")
        self._waiting: OrderedDict[Hashable, deque[_Job]] = OrderedDict()  # by client, the next one to start first
        self._running: Counter[Hashable] = Counter()  # by client, and by (client, host)
        self._num_running = 0
        self._num_bytes = 0
        self._is_closed = False

    def group(self) -> FetchGroup:
        """The fetches of a call, for the client of this context."""
        return FetchGroup(self, current_client.get())

    def submit(self, url: str, group: FetchGroup) -> Future[bytes]:
        """The content of a URL. The future has the errors of `fetch`; cancel it to give up.

        Raises:
            RequestError: After `close`.
        """
        job = _Job(url, group)
        with self._lock:
            if self._is_closed:
                raise _closed()
            self._waiting.setdefault(group.client, deque()).append(job)
            self._start_jobs()
        return job.future

    def end(self, group: FetchGroup) -> None:
        """The contents of a group are no longer held. Idempotent."""
        with self._lock:
            if not group.has_ended:
                group.has_ended = True
                self._num_bytes -= group.num_bytes
                self._start_jobs()

    def close(self) -> None:
        """Fails what waits. What runs ends in the background. Idempotent."""
        with self._lock:
            self._is_closed = True
            waiting = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
        self._threads.shutdown(wait=False)
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(_closed())

    def _start_jobs(self) -> None:
        """Starts what may start, each client's in turn. With the lock."""
        for client in list(self._waiting):
            jobs, kept = self._waiting[client], deque[_Job]()
            has_started = False
            while jobs:
                job = jobs.popleft()
                if job.future.cancelled():
                    continue
                if not self._may_start(job):
                    kept.append(job)
                elif job.future.set_running_or_notify_cancel():
                    self._count(job, 1)
                    job.group.has_started = has_started = True
                    self._threads.submit(self._run, job)
                if not self._has_thread_for(client):
                    break
            kept.extend(jobs)
            self._waiting[client] = kept
            if not kept:
                del self._waiting[client]
            elif has_started:
                self._waiting.move_to_end(client)

    def _may_start(self, job: _Job) -> bool:
        if not self._has_thread_for(job.group.client):
            return False
        if self._num_bytes >= self._max_bytes and not job.group.has_started:
            return False
        return job.group.client is None or self._running[job.host] < MAX_PER_HOST

    def _has_thread_for(self, client: Hashable) -> bool:
        num_free = NUM_THREADS - self._num_running
        if client is None:
            return num_free > 0
        return self._running[client] < min(MAX_PER_CLIENT, num_free)

    def _count(self, job: _Job, count: int) -> None:
        self._num_running += count
        for key in (job.group.client, job.host):
            self._running[key] += count
            if not self._running[key]:
                del self._running[key]

    def _run(self, job: _Job) -> None:
        """Fetches, in a thread."""
        content, error = b"", None
        try:
            content = self._fetch(job.url)
        except BaseException as e:  # noqa: BLE001  (raised by the future)
            error = e
        with self._lock:
            self._count(job, -1)
            if not job.group.has_ended:
                job.group.num_bytes += len(content)
                self._num_bytes += len(content)
            if not self._is_closed:
                self._start_jobs()
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(content)


def _closed() -> RequestError:
    return RequestError("The engine is shutting down.")
