"""Lines that a user types or pipes, each of which is a request."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from mvllm.extension_api import RequestError
from mvllm.extension_api.terminal import print_error

EXIT_WORDS = ("/bye", "/exit", "/quit")


def run_request(request: Callable[[], str | None]) -> None:
    """Runs one request of an interactive command and prints its error, so that the next line of input can follow.

    Args:
        request: Returns the error that ended it, or None. On a terminal, Ctrl-C ends this request alone.
    """
    try:
        error = request()
    except RequestError as e:
        error = str(e)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print(" [stopped]")
        return
    if error:
        print_error(error)


def read_lines(prompt: str) -> Iterator[str]:
    """Lines from the terminal or a pipe until the end of input or a line of EXIT_WORDS. Ctrl-C raises."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines and keeps a history once it is imported)
    while True:
        try:
            line = input(prompt if interactive else "")
        except EOFError:
            if interactive:
                print()
            return
        if line.strip() in EXIT_WORDS:
            return
        yield line
