"""Tests a model's tokenizer in a child process with limits, while the model is loaded.

A `tokenizer.json` may have regular expressions, which the tokenizers library matches by backtracking. With some of them
a line of text takes hours, in native code that cannot be interrupted. The texts here are those that show it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from pathlib import Path

from mvllm.entrypoints.openai.server.tokenizer_trial_process import (
    LOAD_SECONDS,
    MEMORY_BYTES,
    SECONDS,
    TokenizerJob,
    TokenizerResult,
)
from mvllm.errors import ModelError
from mvllm.executor.process.pipe_process import PipeProcess, PipeProcessError

WALL_SECONDS = 300.0
"""Wall time after which a step fails, even if the process got no processor time."""

_HINT = "Check the origin of the tokenizer, or name another folder with --tokenizer."
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


class TokenizerTrial:
    """Starts the process that tokenizes test texts, and has its result. One trial per object.

    Attributes:
        result: Set at the end of the trial; raises ModelError if the tokenizer exceeded a limit.
    """

    def __init__(self) -> None:
        self.result: Future[None] = Future()
        self._process = PipeProcess("mvllm.entrypoints.openai.server.tokenizer_trial_process")

    def start(self, folder: str | None) -> None:
        """Starts the trial in the background.

        Args:
            folder: The tokenizer's folder; without a `tokenizer.json` in it, the trial ends at once.
        """
        # The kernel ends the process together with the thread that started it.
        path = Path(folder or "") / "tokenizer.json"
        has_file = folder is not None and path.is_file()
        threading.Thread(
            target=self._run, args=(path if has_file else None,), name="tokenizer-trial", daemon=True
        ).start()

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._process.close()

    def _run(self, path: Path | None) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled at the shutdown
            try:
                fault = None if path is None else self._find_fault(path)
                if fault is not None:
                    raise ModelError(fault)
            except BaseException as e:  # noqa: BLE001  (raised by the result)
                self.result.set_exception(e)
            else:
                self.result.set_result(None)
            finally:
                self._process.close()

    def _find_fault(self, path: Path) -> str | None:
        """Why the tokenizer cannot be used. That it cannot be loaded is no fault: the server raises that error."""
        for description, text in (("", ""), *probe_texts()):
            try:
                result = self._process.run(TokenizerJob(str(path), text), TokenizerResult, WALL_SECONDS)
            except PipeProcessError as e:
                if e.reason == "killed":
                    return f"The process that tests the tokenizer {path} was killed 2 times; start the server again."
                return None if e.reason == "closed" else _describe_limit(path, description, e.reason)
            if not result.is_loaded:
                return None
            if result.error is not None:
                error = f"its decoder fails with the tokens of {description}: {result.error}"
                return f"The tokenizer {path} cannot be used: {error}. {_HINT}"
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


def _describe_limit(path: Path, description: str, exceeded: str) -> str:
    if exceeded != "memory":
        limit = f"more than {SECONDS if description else LOAD_SECONDS:g} s of processor time"
    elif description:
        limit = f"more memory than the {MEMORY_BYTES >> 20} MB allowed, or it crashed"
    else:
        limit = "more memory than 1 GB and 32 times the size of the file, or it crashed"
    if not description:
        return f"The tokenizer {path} cannot be used: loading it took {limit}. {_HINT}"
    return (
        f"The tokenizer {path} cannot be used: tokenizing short texts took {limit}, the last of them {description}. "
        f"Requests with such texts would stop the server. {_HINT}"
    )
