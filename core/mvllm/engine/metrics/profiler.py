"""A torch profiler around the steps of an engine whose worker runs in this process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvllm.errors import ConfigError, RequestError
from mvllm.logging import get_logger

if TYPE_CHECKING:
    from torch.profiler import profile

logger = get_logger(__name__)

FOLDER_VARIABLE = "MVLLM_TORCH_PROFILER_DIR"
_DEFAULT_FOLDER = "mvllm_profile"


class Profiler:
    """Records torch operations of all threads between `start` and `stop`, and writes a trace in Chrome's format.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: profile | None = None
        self._path = Path()

    def start(self, prefix: str | None = None) -> None:
        """Starts recording.

        Args:
            prefix: The first part of the trace's name.

        Raises:
            RequestError: It records already.
            ConfigError: The folder of the traces cannot be created.
        """
        with self._lock:
            if self._running is not None:
                raise RequestError("The profiler is running. Call stop_profile() first.")
            self._start(prefix)

    def _start(self, prefix: str | None) -> None:
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import profile, supported_activities

        folder = Path(os.environ.get(FOLDER_VARIABLE) or _DEFAULT_FOLDER).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"The folder {str(folder)!r} of {FOLDER_VARIABLE} cannot be created: {e}") from e
        self._path = folder / f"{prefix or 'mvllm'}.{os.getpid()}.{time.time_ns()}.pt.trace.json"
        # Steps may run in another thread than this one, which alone is recorded by default.
        config = _ExperimentalConfig(profile_all_threads=True)
        recorder: Any = profile(activities=supported_activities(), experimental_config=config)
        recorder.start()
        self._running = recorder

    def stop(self) -> Path:
        """Stops recording and writes the trace; returns its path.

        Raises:
            RequestError: It does not record.
        """
        with self._lock:
            recorder, self._running = self._running, None
        if recorder is None:
            raise RequestError("The profiler is not running. Call start_profile() first.")
        recorder.stop()
        recorder.export_chrome_trace(str(self._path))
        logger.info("The trace is in %s. Open it at ui.perfetto.dev or in chrome://tracing.", self._path)
        return self._path
