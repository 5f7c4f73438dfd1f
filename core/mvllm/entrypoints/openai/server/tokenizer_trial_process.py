"""The child process that tests a model's `tokenizer.json` with short texts: `python -m ... <parent pid>`.

A `tokenizer.json` may have regular expressions, which the tokenizers library matches by backtracking. With some of them
a line of text takes hours, in native code that cannot be interrupted. The texts here are those that show it.

    stdin   a TokenizerJob, see pipe_process       stdout  a TrialStep before each step, the last one with `is_last`

The kernel ends the process when it exceeds a limit; the last TrialStep then has the step. The process also ends with
its parent.
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
"""Processor time to load the file; a vocabulary of 262,144 tokens takes two seconds."""
SECONDS = 3.0
"""Processor time of all texts together; common tokenizers take 0.1 to 0.2 seconds."""
MEMORY_BYTES = 512 << 20
"""Address space to tokenize the texts."""

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
"""Characters after a run, at which a match of the whole run fails. Two that are not in the run are used."""


class TokenizerJob(msgspec.Struct, frozen=True):
    """A tokenizer to test.

    Attributes:
        path: Its `tokenizer.json`.
    """

    path: str


class TrialStep(msgspec.Struct, frozen=True):
    """The next step of the process.

    Attributes:
        text: Description of the text to tokenize; empty while the file is loaded.
        error: Why the tokenizer cannot be used.
        is_last: Whether the process has finished.
    """

    text: str = ""
    error: str | None = None
    is_last: bool = False


def main() -> None:
    """Runs the process."""
    die_with_parent(int(sys.argv[1]))
    set_process_name("TokenizerTrial")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")  # each thread reserves address space
    try:
        job = read_message(sys.stdin.buffer, TokenizerJob)
        error = try_tokenizer(Path(job.path), lambda text: write_message(sys.stdout.buffer, TrialStep(text)))
        write_message(sys.stdout.buffer, TrialStep(error=error, is_last=True))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        os._exit(0)


def try_tokenizer(path: Path, report: Callable[[str], None]) -> str | None:
    """Loads a tokenizer, and encodes and decodes each text.

    Args:
        report: Called before each step with the description of the text, which is empty for the loading of the file.

    Returns:
        Why the tokenizer cannot be used. A file that cannot be loaded is not reported: the server, which loads it, too,
        raises the error.
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
    """Texts that regular expressions with nested repetition are slow to reject, each with its description."""
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
