"""The prompt of `mvllm chat` and `mvllm complete`: lines that a user types or pipes, and commands such as `/help`.

On a terminal Ctrl-C stops the answer in progress. At the prompt it asks first: a key press that comes a moment after
the end of an answer must not end the conversation.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mvllm.extension_api import RequestError
from mvllm.extension_api.terminal import print_error

EXIT_WORDS = ("/exit", "/bye", "/quit")
HELP_WORDS = ("/help", "/?")
_ASK_TO_LEAVE = "Press Ctrl-C again or type /exit to leave."
_COMMAND = re.compile(r"(/[a-z?]+)(?:\s+(.*))?", re.DOTALL)
_PROMPT = "> "

Answer = Callable[[str], str | None]
"""Answers a line, or runs a command with the rest of its line; returns the error that ended it, or None."""


@dataclass(frozen=True)
class Command:
    """A command that a user types at the prompt.

    Attributes:
        words: Its name, and others that mean the same.
        help: What it does.
        run: Runs it.
        argument: What follows the name, for the help; empty for nothing.
    """

    words: tuple[str, ...]
    help: str
    run: Answer
    argument: str = ""


def answer_lines(answer: Answer, commands: Sequence[Command] = ()) -> None:
    """Answers each line of input until its end (Ctrl-D), a line of EXIT_WORDS, or a second Ctrl-C at the prompt.

    Args:
        answer: Answers a line that is no command.
        commands: Those beside HELP_WORDS and EXIT_WORDS.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, and the input is no terminal.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines and keeps a history once it is imported)
    by_word = {word: command for command in commands for word in command.words}
    has_asked = is_answering = False
    while True:
        try:
            is_answering = False
            line = _read_line(interactive)
            if line is None or line.strip() in EXIT_WORDS:
                return
            is_answering, has_asked = True, False
            _handle(line, answer, by_word, interactive=interactive)
        except KeyboardInterrupt:
            if not interactive:
                raise
            if is_answering:
                print(" [stopped]")
            elif has_asked:
                print()
                return
            else:
                print(f"\n{_ASK_TO_LEAVE}")
                has_asked = True


def _read_line(interactive: bool) -> str | None:
    """The next line; None at the end of input."""
    try:
        return input(_PROMPT if interactive else "")
    except EOFError:
        if interactive:
            print()
        return None


def _handle(line: str, answer: Answer, by_word: dict[str, Command], *, interactive: bool) -> None:
    found = _COMMAND.fullmatch(line.rstrip())
    command = by_word.get(found[1]) if found else None
    if found and found[1] in HELP_WORDS:
        print(help_text(list(dict.fromkeys(by_word.values()))))
    elif command is not None and found is not None:
        run_request(command.run, found[2] or "")
    elif found and interactive:  # in a file a line like this is text
        print_error(f"There is no command {found[1]}. /help lists them. Begin with a space to send the line as it is.")
    elif line.strip():
        run_request(answer, line)


@contextlib.contextmanager
def stopped_by_ctrl_c() -> Iterator[None]:
    """On a terminal Ctrl-C ends the body, and the program goes on."""
    try:
        yield
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print(" [stopped]")


def run_request(request: Answer, text: str) -> None:
    """Runs one request of an interactive command and prints its error, so that the next line of input can follow."""
    try:
        error = request(text)
    except RequestError as e:
        error = str(e)
    if error:
        print_error(error)


def help_text(commands: Sequence[Command]) -> str:
    """A line for each command, and one for each key."""
    rows = [(f"{', '.join(each.words)} {each.argument}".rstrip(), each.help) for each in commands]
    rows += [(", ".join(HELP_WORDS), "list the commands"), (", ".join(EXIT_WORDS), "leave")]
    rows += [("Ctrl-C", "stop an answer; twice at the prompt, leave"), ("Ctrl-D", "leave")]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:{width}}  {text}" for name, text in rows)
