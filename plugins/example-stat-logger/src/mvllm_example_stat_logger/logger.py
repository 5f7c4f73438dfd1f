"""Stat logger that writes one line of CSV per step."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path

from mvllm.extension_api import EngineConfig, SchedulerStats, StatLogger

VARIABLE = "EXAMPLE_STATS_CSV"
COLUMNS = ("seconds", "new_tokens", "running", "waiting", "kv_cache_usage")


class CsvLogger(StatLogger):
    """Writes each line at once, so that a crash loses none."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._file = Path(os.environ.get(VARIABLE, "stats.csv")).open("w", newline="", encoding="utf-8")  # noqa: SIM115
        self._writer = csv.writer(self._file)
        self._writer.writerow(COLUMNS)
        self._started = time.monotonic()

    def record(self, stats: SchedulerStats, num_new_tokens: int) -> None:
        seconds = round(time.monotonic() - self._started, 6)
        self._writer.writerow((seconds, num_new_tokens, stats.num_running, stats.num_waiting, stats.kv_cache_usage))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
