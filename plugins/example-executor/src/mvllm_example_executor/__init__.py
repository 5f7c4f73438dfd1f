"""Example executor plugin: one worker in this process, and a record of every step.

    mvllm generate --model demo --prompt "Once" --distributed-executor-backend recording

writes one line of JSON per step to the file that EXAMPLE_EXECUTOR_RECORD names (`steps.jsonl`, if none does).
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from mvllm.extension_api import UniProcExecutor

if TYPE_CHECKING:
    from mvllm.extension_api import EngineConfig, ModelRunnerOutput, Platform, SchedulerOutput

VARIABLE = "EXAMPLE_EXECUTOR_RECORD"


class RecordingExecutor(UniProcExecutor):
    """Core's executor for one worker, with a record of the steps."""

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        super().__init__(config, platform)
        self._path = Path(os.environ.get(VARIABLE, "steps.jsonl"))

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        started = time.perf_counter()
        future = super().execute_model(plan)
        line = {"step": plan.step, "milliseconds": round((time.perf_counter() - started) * 1000, 3)}
        with self._path.open("a", encoding="utf-8") as record:
            record.write(json.dumps(line) + "\n")
        return future
