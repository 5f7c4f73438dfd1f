"""Progress bars: tqdm on a terminal or in a notebook, else a log line every ten seconds."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from mvllm.logging import get_logger

logger = get_logger(__name__)

SECONDS_BETWEEN_LINES = 10.0
ERASE_LINE = "\r\x1b[K"


def has_terminal() -> bool:
    """Whether a progress bar can be drawn: stderr is a terminal, or this is a notebook."""
    if "ipykernel" in sys.modules:
        return True
    return sys.stderr is not None and sys.stderr.isatty()


def progress_class() -> Any:
    """A class with tqdm's interface: tqdm itself where bars can be drawn, else a class that writes to the log."""
    if not has_terminal():
        return _logged_tqdm()
    from tqdm.auto import tqdm

    return tqdm


def show_progress(total: int | None, what: str, *, disable: bool = False, **settings: Any) -> Any:
    """A progress bar or its log lines, with tqdm's interface; a context manager.

    Args:
        total: Number of units; None if unknown.
        what: Title in front of the numbers.
        disable: Show nothing.
        settings: Other arguments of tqdm, such as `unit`.
    """
    return progress_class()(total=total, desc=what, disable=disable, **settings)


@contextlib.contextmanager
def show_status(text: str) -> Iterator[None]:
    """While the body runs, a line on the terminal with `text` and the seconds since its start, which is then erased.

    Nothing is shown in the first second, while a progress bar is drawn, where stderr is no terminal, and where the log
    has lines about progress (INFO).
    """
    is_terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if not is_terminal or logger.isEnabledFor(logging.INFO):
        yield
        return
    start, ended = time.monotonic(), threading.Event()
    drawn = False

    def draw() -> None:
        nonlocal drawn
        while not ended.wait(1.0):
            bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
            if not getattr(bars, "_instances", None):
                drawn = True
                # The cursor is at the beginning of the line, so that a line of the log overwrites this one.
                sys.stderr.write(f"{ERASE_LINE}{text}: {time.monotonic() - start:.0f} s\r")
                sys.stderr.flush()

    thread = threading.Thread(target=draw, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if drawn:
            sys.stderr.write(ERASE_LINE)
            sys.stderr.flush()


@functools.cache
def _logged_tqdm() -> Any:
    from tqdm import tqdm

    class LoggedTqdm(tqdm):  # type: ignore[misc]
        """A tqdm that logs instead of drawing: every SECONDS_BETWEEN_LINES seconds, and at the end."""

        monitor_interval = 0  # no thread that redraws bars

        def __init__(self, *args: Any, **settings: Any) -> None:
            self._logged_at = time.monotonic()
            self._has_ended = False
            super().__init__(*args, **{**settings, "file": io.StringIO(), "miniters": 0, "mininterval": 0.1})

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            now = time.monotonic()
            if not self._has_ended and now - self._logged_at >= SECONDS_BETWEEN_LINES:
                self._log(now)
            return True

        def close(self) -> None:
            if not self.disable and not self._has_ended and self.n:
                self._log(time.monotonic())
            self._has_ended = True
            super().close()

        def _log(self, now: float) -> None:
            self._logged_at = now
            numbers = self.format_dict
            size = functools.partial(self.format_sizeof, divisor=self.unit_divisor)
            show = size if self.unit_scale else str
            unit = "" if self.unit == "it" else self.unit
            done = f"{show(self.n)}{unit}"
            if self.total:
                done += f" of {show(self.total)}{unit} ({self.n / self.total:.0%})"
            more = f", {self.postfix}" if self.postfix else ""
            logger.info("%s: %s in %.1f s%s", (self.desc or "Done").removesuffix(": "), done, numbers["elapsed"], more)

    return LoggedTqdm
