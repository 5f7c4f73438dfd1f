"""FairLock: a reentrant lock that threads get in the order in which they asked for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class FairLock:
    """A reentrant lock with a queue, used with `with`.

    A thread that releases a `threading.RLock` and takes it again at once, as a step loop does, usually gets it before
    the threads that wait. Here it gets it after them.

    Args:
        on_wait: Called in a thread that has to wait, when it is in the queue.
    """

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        self._on_wait = on_wait
        self._state = threading.Lock()  # held for a few instructions
        self._owner: int | None = None
        self._depth = 0
        self._queue: deque[tuple[int, threading.Lock]] = deque()

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        with self._state:
            if self._owner is None:
                self._owner, self._depth = me, 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._queue.append((me, turn))
        try:
            self._on_wait()
            turn.acquire()  # until the lock is handed over
        except BaseException:  # Ctrl-C
            with self._state:
                if self._owner == me:
                    self._hand_over()
                else:
                    self._queue.remove((me, turn))
            raise

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            with self._state:
                self._hand_over()

    def _hand_over(self) -> None:
        self._owner = None
        if self._queue:
            self._owner, turn = self._queue.popleft()
            self._depth = 1
            turn.release()
