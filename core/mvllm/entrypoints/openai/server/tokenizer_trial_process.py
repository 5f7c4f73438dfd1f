"""Tokenizes short texts with a model's `tokenizer.json`, under limits: `python -m ... <parent pid>`.

A `tokenizer.json` may hold regular expressions. The library searches with them by backtracking: with some expressions,
a line of text takes hours, in native code that nothing can interrupt. The texts here are of the kinds that show it.

    stdin   a CompileJob, see pipe_messages        stdout  a TrialStep before each step, the last one with `is_last`

The kernel ends the process when it exceeds a limit; the last TrialStep then says in which step. The process ends with
its parent, too.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from mvllm.executor.process.pipe_process import read_message, write_message
from mvllm.executor.process.process_utils import die_with_parent, limit_memory, limit_processor_time, set_process_name

LOAD_SECONDS = 60.0
"""Processor time to load the file; a vocabulary of 262,144 tokens takes two."""
SECONDS = 3.0
"""Processor time of all texts together; tokenizers in use take a tenth or two of one."""
MEMORY_BYTES = 512 << 20
"""Address space for the texts."""

_LOAD_BYTES = 1 << 30
_LOAD_BYTES_PER_BYTE = 32  # of the file: vocabularies take about ten times its size
_LENGTH = 2000
_RUNS = (21, 29, 110, 300)
"""Lengths of short runs. The steps of a search grow as a power of the length, or exponentially, and the library gives
up a match, with an error, after ten million: the slowest run is just short enough for that."""
_KINDS = {
    "letters": "a",
    "capital letters": "A",
    "digits": "1",
    "spaces": " ",
    "line breaks": "\n",
    "tabs": "\t",
    "exclamation marks": "!",
    "hyphens": "-",
    "apostrophes": "'",
    "accented letters": "é",
    "Chinese characters": "漢",
    "combining accents": "\u0301",
    "letters and spaces in turn": "a ",
    "letters and digits in turn": "a1",
    "letters and periods in turn": "a.",
    "spaces and line breaks in turn": " \n",
}
_ENDS = ("\0", "a", "!")
"""A character after a run, where a match of all of it fails; two that are not of the run's kind."""


class CompileJob(msgspec.Struct, frozen=True):
    """A tokenizer to try.

    Attributes:
        path: Its `tokenizer.json`.
    """

    path: str


class TrialStep(msgspec.Struct, frozen=True):
    """What the process does next.

    Attributes:
        text: The text that it tokenizes, in words; empty while it loads the file.
        error: Why the tokenizer cannot be used.
        is_last: Whether nothing follows.
    """

    text: str = ""
    error: str | None = None
    is_last: bool = False


def main() -> None:
    """The program."""
    die_with_parent(int(sys.argv[1]))
    set_process_name("TokenizerTrial")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")  # each thread reserves address space
    try:
        job = read_message(sys.stdin.buffer, CompileJob)
        error = try_tokenizer(Path(job.path), lambda text: write_message(sys.stdout.buffer, TrialStep(text)))
        write_message(sys.stdout.buffer, TrialStep(error=error, is_last=True))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        os._exit(0)


def try_tokenizer(path: Path, report: Callable[[str], None]) -> str | None:
    """Loads a tokenizer, and encodes and decodes each text.

    Args:
        report: Called before each step, with the text in words; with nothing before the file is loaded.

    Returns:
        Why it cannot be used. A file that cannot be loaded is no reason: the server that loads it says why.
    """
    from tokenizers import Tokenizer

    limit_processor_time(LOAD_SECONDS)
    limit_memory(_LOAD_BYTES + _LOAD_BYTES_PER_BYTE * path.stat().st_size)
    report("")
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001  (the library raises nothing narrower)
        return None
    tokenizer.no_truncation()  # as the server uses it
    tokenizer.no_padding()
    limit_processor_time(SECONDS)
    limit_memory(MEMORY_BYTES)
    for description, text in probe_texts():
        report(description)
        try:
            ids = tokenizer.encode_batch_fast([text])[0].ids
        except BaseException:  # noqa: BLE001  (Rust's panics are no Exception; a request with such a text gets an error)
            continue
        try:
            tokenizer.decode(ids)
        except BaseException as e:  # noqa: BLE001
            return f"its decoder fails with the tokens of {description}: {e}"
    return None


def probe_texts() -> Iterator[tuple[str, str]]:
    """Texts that expressions with nested or repeated repetition are slow to reject, each with its description."""
    for name, unit in _KINDS.items():
        for end in [end for end in _ENDS if end not in unit.lower()][:2]:
            run = unit * (_LENGTH // len(unit))
            yield f"{_LENGTH} {name}, then {end!r}", run + end
            for length in _RUNS:
                part = run[:length] + end
                text = part * (_LENGTH // len(part))
                yield f"{len(text)} characters, {length} {name}, then {end!r}, again and again", text


if __name__ == "__main__":
    main()
