"""Tests a model's tokenizer in a child process with limits, while the model is loaded."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from concurrent.futures import Future, InvalidStateError
from pathlib import Path

from mvllm.entrypoints.openai.server.tokenizer_trial_process import (
    LOAD_SECONDS,
    MEMORY_BYTES,
    SECONDS,
    TokenizerJob,
    TrialStep,
)
from mvllm.errors import ModelError
from mvllm.executor.process.pipe_process import (
    find_exceeded_limit,
    kill_pipe_process,
    receive_message,
    start_pipe_process,
    write_message,
)

WALL_SECONDS = 300.0
"""Wall time after which a step fails, even if the process got no processor time."""

_ATTEMPTS = 2
_HINT = "Check the origin of the tokenizer, or name another folder with --tokenizer."


class TokenizerTrial:
    """Starts the process that tokenizes test texts, and has its result. One trial per object.

    Attributes:
        result: Set at the end of the trial; raises ModelError if the tokenizer exceeded a limit.
    """

    def __init__(self) -> None:
        self.result: Future[None] = Future()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def start(self, folder: str | None) -> None:
        """Starts the trial in the background.

        Args:
            folder: The tokenizer's folder; without a `tokenizer.json` in it, the trial ends at once.
        """
        path = Path(folder or "") / "tokenizer.json"
        if folder is None or not path.is_file():
            self._set_result(None)
            return
        # The kernel ends the process together with the thread that started it.
        threading.Thread(target=self._run, args=(path,), name="tokenizer-trial", daemon=True).start()

    def close(self) -> None:
        """Ends the process. Idempotent."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _run(self, path: Path) -> None:
        error: BaseException | None = None
        try:
            message = self._try(path)
        except BaseException as e:  # noqa: BLE001  (raised by the result)
            error = e
        else:
            error = ModelError(message) if message is not None else None
        self._set_result(error)

    def _set_result(self, error: BaseException | None) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled at the shutdown
            if error is None:
                self.result.set_result(None)
            else:
                self.result.set_exception(error)

    def _try(self, path: Path) -> str | None:
        """Why the tokenizer cannot be used."""
        for _ in range(_ATTEMPTS):
            with self._lock:
                if self._closed:
                    return None
                self._process = process = start_pipe_process("mvllm.entrypoints.openai.server.tokenizer_trial_process")
            step = TrialStep()
            assert process.stdin is not None and process.stdout is not None
            try:
                write_message(process.stdin, TokenizerJob(str(path)))
                while not step.is_last:
                    step = receive_message(process.stdout, TrialStep, WALL_SECONDS)
            except (EOFError, OSError) as e:  # TimeoutError is an OSError
                exceeded = "time" if isinstance(e, TimeoutError) else find_exceeded_limit(process, WALL_SECONDS)
                if exceeded is not None:
                    return _describe_limit(path, step, exceeded)
            else:
                return None if step.error is None else f"The tokenizer {path} cannot be used: {step.error}. {_HINT}"
            finally:
                kill_pipe_process(process)
        return f"The process that tests the tokenizer {path} was killed {_ATTEMPTS} times; start the server again."


def _describe_limit(path: Path, step: TrialStep, exceeded: str) -> str:
    if exceeded == "time":
        limit = f"more than {SECONDS if step.text else LOAD_SECONDS:g} s of processor time"
    elif step.text:
        limit = f"more memory than the {MEMORY_BYTES >> 20} MB allowed, or it crashed"
    else:
        limit = "more memory than 1 GB and 32 times the size of the file, or it crashed"
    if not step.text:
        return f"The tokenizer {path} cannot be used: loading it took {limit}. {_HINT}"
    return (
        f"The tokenizer {path} cannot be used: tokenizing short texts took {limit}, the last of them {step.text}. "
        f"Requests with such texts would stop the server. {_HINT}"
    )
