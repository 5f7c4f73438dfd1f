"""Communication between pipeline stages: hidden states to the next stage, sampled tokens back from the last one.

No stage waits for the tokens of a step before it starts another. It receives them when a plan contains a row to which
they belong, or when the output is collected. With as many steps in flight as stages, all stages compute:

    stage 0    forward 0   forward 1              receive 0, forward 2   receive 1, forward 3
    stage 1                forward 0, sample 0    forward 1, sample 1    forward 2, sample 2
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.platform.runtime import DeviceRuntime
from mvllm.worker.input_batch import InputBatch


@dataclass
class _PendingOutput:
    """A step whose output this stage has not received yet.

    Attributes:
        step: The plan's step.
        rows: int64 [R]: the rows in batch order.
        sampling_positions: int64 [S]: positions among them of the rows that sample.
        sampled_rows: The rows that sample.
    """

    step: int
    rows: np.ndarray
    sampling_positions: np.ndarray
    sampled_rows: frozenset[int]


class PipelineTransport:
    """Sends to and receives from the other stages.

    Args:
        group: The pipeline group.
        runtime: The device.
        hidden_size, dtype: Of the hidden states.
        every_rank_answers: Every stage returns the whole output of every step, not only the last.
    """

    def __init__(
        self,
        group: GroupCoordinator,
        runtime: DeviceRuntime,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        every_rank_answers: bool,
    ) -> None:
        self._group = group
        self._runtime = runtime
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._every_rank_answers = every_rank_answers
        self._awaited_steps: deque[_PendingOutput] = deque()
        self._outputs: dict[int, ModelRunnerOutput] = {}

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds tokens."""
        return self._group.is_first

    @property
    def is_last(self) -> bool:
        """Whether this stage samples."""
        return self._group.is_last

    # --- forward

    def receive_hidden(self, num_tokens: int) -> torch.Tensor | None:
        """Hidden states of the step from the previous stage: [num_tokens, hidden_size]; None on the first stage."""
        if self.is_first:
            return None
        return self._group.recv((num_tokens, self._hidden_size), self._dtype, self._group.rank_in_group - 1)

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Sends the hidden states of the step to the next stage."""
        self._group.send(hidden, self._group.rank_in_group + 1)

    def zero_hidden_states(self, num_tokens: int) -> torch.Tensor | None:
        """Zeros instead of `receive_hidden`, for runs of this stage alone; None on the first stage."""
        if self.is_first:
            return None
        return torch.zeros((num_tokens, self._hidden_size), dtype=self._dtype, device=self._runtime.device)

    def send_item_report(self, errors: dict[int, str], encoder_seconds: float) -> None:
        """On the first stage, in a step that reads items: tells the last stage why embeddings are missing.

        Args:
            errors: By position in the batch.
            encoder_seconds: As in ModelRunnerOutput.
        """
        payload = msgspec.msgpack.encode((errors, encoder_seconds))
        self._group.cpu_group.send(payload, self._group.world_size - 1)

    def receive_item_report(self) -> tuple[dict[int, str], float]:
        """On the last stage, in a step that reads items: the arguments of `send_item_report`."""
        payload = self._group.cpu_group.receive(0)
        return msgspec.msgpack.decode(payload, type=tuple[dict[int, str], float])

    # --- back

    def send_output(self, output: ModelRunnerOutput, *, any_sampled: bool) -> None:
        """On the last stage: sends the output of a step, or its tokens, to the other stages."""
        if self._every_rank_answers:
            message = output
        elif any_sampled:
            message = ModelRunnerOutput(
                step=output.step,
                sampled_token_ids=output.sampled_token_ids,
                further_token_ids=output.further_token_ids,
            )
        else:
            return
        self._group.cpu_group.send(msgspec.msgpack.encode(message), *range(self._group.world_size - 1))

    def expect_output(self, step: int, rows: np.ndarray, sampling_positions: np.ndarray) -> None:
        """On the other stages: records that the last stage will call `send_output` for this step."""
        if self._every_rank_answers or len(sampling_positions):
            self._awaited_steps.append(
                _PendingOutput(step, rows, sampling_positions, frozenset(rows[sampling_positions].tolist()))
            )

    def skip_step(self, step: int) -> None:
        """On the other stages: records the empty output of a step in which nothing is computed."""
        if self._every_rank_answers:
            self._outputs[step] = ModelRunnerOutput(step=step)

    def apply_pending_outputs(self, plan: SchedulerOutput, table: InputBatch) -> None:
        """Receives the tokens of all rows in `plan`, before it is applied to `table`."""
        if not self._awaited_steps:
            return
        touched = {*plan.rows, *plan.freed_rows}
        while any(not touched.isdisjoint(awaited.sampled_rows) for awaited in self._awaited_steps):
            self._receive_oldest_output(table)

    def collect_output(self, step: int, table: InputBatch) -> ModelRunnerOutput:
        """Waits for the output of a step."""
        while step not in self._outputs:
            self._receive_oldest_output(table)
        return self._outputs.pop(step)

    def _receive_oldest_output(self, table: InputBatch) -> None:
        """Receives the oldest pending output, and appends its tokens to their rows."""
        awaited = self._awaited_steps.popleft()
        payload = self._group.cpu_group.receive(self._group.world_size - 1)
        output = msgspec.msgpack.decode(payload, type=ModelRunnerOutput)
        assert output.step == awaited.step, f"expected the output of step {awaited.step}, got {output.step}"
        tokens = np.array(output.sampled_token_ids, dtype=np.int64)
        accepted = {int(awaited.rows[position]): drafts for position, drafts in output.further_token_ids.items()}
        table.append_sampled_tokens(
            awaited.rows[awaited.sampling_positions], tokens[awaited.sampling_positions], accepted
        )
        if self._every_rank_answers:
            self._outputs[output.step] = output
