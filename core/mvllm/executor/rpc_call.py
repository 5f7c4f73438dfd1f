"""One call to workers in other processes: the table entry that collects replies, and the caller's future."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from mvllm.executor.rpc_messages import MethodCodec, Reply

T = TypeVar("T")


class ReplyReader(Protocol):
    """What reads the replies of calls: an RpcExecutor."""

    def request_deferred_reply(self, future: RpcFuture[Any]) -> None:
        """Asks the workers for a reply that they hold back until it is asked for."""

    def poll_replies(self) -> None:
        """Reads the replies that have arrived."""

    def wait_for(self, future: RpcFuture[Any], timeout: float | None, *, cancel_on_timeout: bool) -> None:
        """Reads replies until the future is resolved."""


class RpcFuture(Future[T], Generic[T]):
    """The result of a call. Waiting for it reads the replies, so wait in the executor's thread.

    Args:
        executor: The executor that made the call.
        timeout: Seconds that `result` waits if its caller names no timeout, counted from the call of `result`.
    """

    def __init__(self, executor: ReplyReader, timeout: float | None) -> None:
        super().__init__()
        self._executor = executor
        self._timeout = timeout
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> T:
        """The result.

        Raises:
            TimeoutError: It has not arrived in time; the message names the workers that have not replied.
            Exception: A worker's own exception, or the failure of a worker's process.
        """
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise, or None."""
        self._wait(timeout)
        return super().exception(0)

    def done(self) -> bool:
        """Whether `result` would return at once."""
        if not super().done():
            self._executor.request_deferred_reply(self)
            self._executor.poll_replies()
        return super().done()

    @property
    def is_resolved(self) -> bool:
        """As `done`, without reading replies."""
        return super().done()

    def _wait(self, timeout: float | None) -> None:
        if timeout is None:
            self._executor.wait_for(self, self._timeout, cancel_on_timeout=True)
        else:
            self._executor.wait_for(self, timeout, cancel_on_timeout=False)


class RpcCall:
    """A pending call: the results received so far and the ranks that have not replied.

    Attributes:
        label: The name of the call in errors and logs.
    """

    def __init__(self, request_id: int, codec: MethodCodec, ranks: Sequence[int], future: RpcFuture[Any]) -> None:
        self.id = request_id
        self.codec = codec
        self.missing = set(ranks)
        self.results: dict[int, Any] = {}
        self.future = future
        self.label = codec.name

    def add_reply(self, reply: Reply) -> bool:
        """Stores one rank's result; returns whether it was the last one."""
        self.missing.discard(reply.rank)
        self.results[reply.rank] = self.codec.result.decode(reply.result)
        return not self.missing
