"""The engine core's list of adapters, before a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from mvllm.config.engine_config import LoRAConfig
from mvllm.engine.core.lora_manager import LoRAManager
from mvllm.executor.interface import Executor
from mvllm.messages.lora import LoRARequest
from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.scheduler_output import NewRequestData, SchedulerOutput


class Workers:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[None]:
        self.calls.append(method)
        return [None]


def test_running_requests_are_looked_at_once_for_all_requests_of_a_step(tmp_path: Path) -> None:
    workers, looks = Workers(), []
    manager = LoRAManager(LoRAConfig(max_cpu_loras=2), cast(Executor, workers))
    adapter = LoRARequest("a", 1, str(tmp_path))
    new = [
        NewRequestData(f"r{row}", row, [1], 1, 0, [0], SamplingParams(), [], lora_request=adapter) for row in range(3)
    ]

    def in_use() -> set[int]:
        looks.append(1)
        return {1}

    assert manager.load_for_step(SchedulerOutput(step=0, rows=[0, 1, 2], new_requests=new), in_use) == {}
    assert (workers.calls, len(looks)) == (["add_lora"], 1)
    assert manager.load_for_step(SchedulerOutput(step=1, rows=[0, 1, 2]), in_use) == {}
    assert len(looks) == 1
