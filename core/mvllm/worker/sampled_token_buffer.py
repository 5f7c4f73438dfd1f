"""Sampled tokens that stay on the device between steps, so that the next step starts without waiting for the host.

The device holds the last sampled token of every row. Input ids come from the host in one copy; a token unknown to the
host is a placeholder that names its row, and the device replaces it.

    host    history of row 2  [11, 40, 8, -3]      -3 = -1 - row: sampled by a step that was not read yet
    device  last token        [ 5,  9, 7,  0]
            input ids         [.., -3, ..]  ->  [.., 7, ..]

Results are read when they are collected, one step late. They are read earlier if a row samples whose next token depends
on the previous ones in a way that only the host can compute (bad words of several tokens, logits processors that read
tokens). Penalties are computed on the device, see DeviceTokenCounts.
"""

from __future__ import annotations

from collections import deque

import torch

from mvllm.messages.scheduler_output import ModelRunnerOutput
from mvllm.platform.runtime import DeviceRuntime
from mvllm.sampling.sampler_output import SamplerOutput
from mvllm.sampling.token_history import PlaceholderTokens, TokenHistory
from mvllm.worker.step_result import StepResult


class SampledTokenBuffer:
    """The last sampled tokens on the device, and the results of steps that were not read yet.

    Args:
        runtime: The device.
        history: The rows' tokens as the host knows them.
    """

    def __init__(self, runtime: DeviceRuntime, history: TokenHistory) -> None:
        self._runtime = runtime
        self._history = history
        self._last_token_ids = runtime.empty((len(history.num_tokens) + 1,), torch.int32)  # one more for padding
        self._unread_steps: deque[tuple[StepResult, PlaceholderTokens]] = deque()
        self._outputs: dict[int, ModelRunnerOutput] = {}

    def replace_placeholders(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Replaces placeholders in input ids by the sampled tokens.

        Args:
            token_ids: int32 [T] on the device.
        """
        rows = (-1 - token_ids).clamp_(min=0)
        return torch.where(token_ids < 0, self._last_token_ids.index_select(0, rows), token_ids)

    def store(self, sampled: SamplerOutput, rows: torch.Tensor) -> None:
        """Stores the sampled tokens of a step, on the device.

        Args:
            sampled: n tokens.
            rows: int32 [n or more] on the device; their rows.
        """
        self.store_token_ids(sampled.token_ids, rows)

    def store_token_ids(self, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Stores sampled tokens, on the device.

        Args:
            token_ids: int [n] on the device.
            rows: int32 [n or more] on the device; their rows.
        """
        self._last_token_ids.index_copy_(0, rows[: len(token_ids)].long(), token_ids.to(torch.int32))

    def add_step(self, result: StepResult) -> None:
        """Adds a submitted step. Each sampling row has one token more from now on."""
        if result.sampled is not None:
            result.sampled.send_to_host(self._runtime.to_host)
        self._unread_steps.append((result, self._history.append_placeholders(result.rows[result.sampling_positions])))

    def add_failed_step(self, output: ModelRunnerOutput) -> None:
        """Adds the output of a step in which all rows have failed."""
        self._outputs[output.step] = output

    def read_all_steps(self) -> None:
        """Waits for all steps added so far. Afterwards the host knows every token."""
        while self._unread_steps:
            self._read_oldest_step()

    def collect_output(self, step: int) -> ModelRunnerOutput:
        """Waits for the output of a step. Call it once per step."""
        while step not in self._outputs:
            self._read_oldest_step()
        return self._outputs.pop(step)

    def _read_oldest_step(self) -> None:
        result, places = self._unread_steps.popleft()
        output, tokens = result.read()
        self._history.fill_placeholders(places, tokens)
        self._outputs[result.step] = output
