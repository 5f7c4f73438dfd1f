"""The null device with steps that take time: base + tokens x cost of a token, in the variable TIMED_DEVICE.

Steps run one after the other, like on a device: `execute_model` submits one, `collect_output` waits until it is over.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import replace

from mvllm.plugin_api import (
    Capabilities,
    EngineConfig,
    ModelRunnerOutput,
    Platform,
    PlatformSpec,
    ProbeResult,
    SchedulerOutput,
    WorkerContext,
    hookimpl,
)
from mvllm_null_device.plugin import NullPlatform, NullWorker

COST = "TIMED_DEVICE"
"""Environment variable: milliseconds of a step and microseconds of a token, as '8,30'."""

SPEC = PlatformSpec(
    name="timed",
    vendor="tests",
    contract=(1, 0),
    probe="tests.helpers.timed_device:probe",
    factory="tests.helpers.timed_device:TimedPlatform",
    by_name_only=True,
    probe_in_process=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    return SPEC


def probe() -> ProbeResult:
    return ProbeResult(COST in os.environ, f"{COST} is set or not", remedy=f"set {COST}")


class TimedPlatform(NullPlatform):
    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, async_copies=True)

    def worker_class(self) -> str:
        return "tests.helpers.timed_device:TimedWorker"


class TimedWorker(NullWorker):
    def __init__(self, config: EngineConfig, platform: Platform, ctx: WorkerContext) -> None:
        super().__init__(config, platform, ctx)
        milliseconds, microseconds = os.environ[COST].split(",")
        self._base, self._per_token = float(milliseconds) / 1e3, float(microseconds) / 1e6
        self._is_free_at = 0.0
        self._submitted: deque[tuple[ModelRunnerOutput, float]] = deque()

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute_model(plan)
        if not plan.rows:
            return output
        seconds = self._base + self._per_token * plan.total_num_scheduled_tokens
        self._is_free_at = max(self._is_free_at, time.monotonic()) + seconds
        self._submitted.append((output, self._is_free_at))
        return None  # type: ignore[return-value]  # the protocol's other answer

    def collect_output(self, step: int) -> ModelRunnerOutput:
        output, ready = self._submitted.popleft()
        assert output.step == step
        time.sleep(max(0.0, ready - time.monotonic()))
        return output
