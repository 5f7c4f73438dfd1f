"""Builders for the worker's tests: a host runtime, rows and plans."""

from __future__ import annotations

import numpy as np
import torch

from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.scheduler_output import NewRequestData, SchedulerOutput
from mvllm.platform.runtime import DeviceRuntime, FinishedHostCopy, HostCopy, MemoryInfo
from mvllm.platform.shapes import ShapePolicy
from mvllm.sampling.sampling_state import SamplingState
from mvllm.worker.input_batch import InputBatch
from mvllm.worker.step_inputs import StepInputBuilder

BLOCK_SIZE = 4
VOCAB_SIZE = 100


class HostRuntime(DeviceRuntime):
    """A runtime whose device is the host; counts copies."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_copies = 0

    def synchronize(self) -> None:
        pass

    def memory(self) -> MemoryInfo:
        return MemoryInfo(0, 0, 0, 0)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, 77, dtype=dtype)  # makes unwritten elements visible

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        self.num_copies += 1
        return host.clone()

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        return FinishedHostCopy(tensor.clone())

    def seed(self, seed: int) -> None:
        pass


def make_rows(
    max_rows: int = 4, max_model_len: int = 16, num_groups: int = 1, *, has_non_causal_spans: bool = False
) -> InputBatch:
    state = SamplingState(max_rows, VOCAB_SIZE, 0)
    return InputBatch(max_rows, max_model_len, BLOCK_SIZE, state, num_groups, has_non_causal_spans=has_non_causal_spans)


def make_builder(
    rows: InputBatch, shapes: ShapePolicy | None = None, *, runtime: DeviceRuntime | None = None, **settings: bool
) -> StepInputBuilder:
    return StepInputBuilder(
        rows,
        block_size=BLOCK_SIZE,
        max_tokens=16,
        max_rows=rows.max_rows,
        runtime=runtime or HostRuntime(),
        shapes=shapes or ShapePolicy(),
        **settings,
    )


def make_new(
    row: int,
    token_ids: list[int],
    blocks: list[int],
    *more_blocks: list[int],
    num_prompt: int | None = None,
    computed: int = 0,
    **params,
) -> NewRequestData:
    return NewRequestData(
        request_id=f"request-{row}",
        row=row,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt,
        num_computed_tokens=computed,
        block_ids=blocks,
        sampling_params=SamplingParams(**params),
        eos_token_ids=[],
        more_block_ids=list(more_blocks),
    )


def make_plan(scheduled: dict[int, int], *, step: int = 0, **changes) -> SchedulerOutput:
    """A plan with the number of scheduled tokens for each row of `scheduled`."""
    return SchedulerOutput(
        step=step,
        rows=list(scheduled),
        num_scheduled_tokens=list(scheduled.values()),
        total_num_scheduled_tokens=sum(scheduled.values()),
        **changes,
    )


def slots_of(blocks: list[int], positions: range) -> list[int]:
    """KV slots of `positions` of a sequence with these blocks."""
    return [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]


def as_list(values: torch.Tensor | np.ndarray) -> list:
    return values.tolist()
