"""The child process that tests a model's `tokenizer.json` with short texts: `python -m ... <parent pid>`.

    stdin   TokenizerJobs, see pipe_process        stdout  a TokenizerResult for each

The first job loads the file. The kernel ends the process when it exceeds a limit. It also ends with its parent.
"""

from __future__ import annotations

import os
import resource
import sys
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


class TokenizerJob(msgspec.Struct, frozen=True):
    """A text to tokenize.

    Attributes:
        path: The `tokenizer.json`.
        text: The text; empty to load the file only.
    """

    path: str
    text: str


class TokenizerResult(msgspec.Struct, frozen=True):
    """The result of a job.

    Attributes:
        is_loaded: Whether the file could be loaded.
        error: Why its decoder fails.
    """

    is_loaded: bool
    error: str | None


def main() -> None:
    """Runs the process."""
    die_with_parent(int(sys.argv[1]))
    set_process_name("TokenizerTrial")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")  # each thread reserves address space
    tokenizer: Any = None
    try:
        while True:
            job = read_message(sys.stdin.buffer, TokenizerJob)
            if tokenizer is None:
                tokenizer = _load(Path(job.path))
            error = _decoder_error(tokenizer, job.text) if job.text and tokenizer is not None else None
            write_message(sys.stdout.buffer, TokenizerResult(tokenizer is not None, error))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        os._exit(0)


def _load(path: Path) -> Any:
    """The tokenizer; None if it cannot be loaded. Sets the limits for texts."""
    from tokenizers import Tokenizer

    limit_processor_time(LOAD_SECONDS)
    limit_memory(_LOAD_BYTES + _LOAD_BYTES_PER_BYTE * path.stat().st_size)
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001  (the library raises nothing narrower)
        return None
    tokenizer.no_truncation()  # as the server uses it
    tokenizer.no_padding()
    limit_processor_time(SECONDS)
    limit_memory(MEMORY_BYTES)
    return tokenizer


def _decoder_error(tokenizer: Any, text: str) -> str | None:
    """Encodes and decodes a text; returns the error of the decoder."""
    try:
        ids = tokenizer.encode_batch_fast([text])[0].ids
    except BaseException:  # noqa: BLE001  (Rust's panics are no Exception; a request with such a text gets an error)
        return None
    try:
        tokenizer.decode(ids)
    except BaseException as e:  # noqa: BLE001
        return str(e)
    return None


if __name__ == "__main__":
    main()
