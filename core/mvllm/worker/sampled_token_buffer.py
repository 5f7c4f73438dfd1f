"""Sampled tokens that stay on the device between steps, so that the host need not wait for them to start the next.

The device keeps the last sampled token of every row. A step's input ids come from the host in one copy, as ever; where
a token is not known there, stands a mark that names its row, and the device puts the token in its place.

    host    history of row 2  [11, 40, 8, -3]      -3 = -1 - row: sampled by a step that nobody has read
    device  last token        [ 5,  9, 7,  0]
            input ids         [.., -3, ..]  ->  [.., 7, ..]

Results are read when they are asked for, one step late, or before that when a row is to be sampled whose next token
depends on the last one in a way that only the host can compute (bad words of several tokens, logits processors that
read tokens). Penalties are no such thing: what they need is counted on the device, see DeviceTokenCounts.
"""

from __future__ import annotations

from collections import deque

import torch

from mvllm.messages.scheduler_output import ModelRunnerOutput
from mvllm.platform.runtime import DeviceRuntime
from mvllm.sampling.sampler_output import SamplerOutput
from mvllm.sampling.sampling_state import PlaceholderTokens, TokenHistory
from mvllm.worker.step_result import StepResult


class SampledTokenBuffer:
    """The last tokens on the device, and the results of steps that nobody has read.

    Args:
        runtime: The device.
        history: The rows' tokens as the host knows them.
    """

    def __init__(self, runtime: DeviceRuntime, history: TokenHistory) -> None:
        self._runtime = runtime
        self._history = history
        self._last_token_ids = runtime.empty((len(history.num_tokens) + 1,), torch.int32)  # one to spare, for padding
        self._unread_steps: deque[tuple[StepResult, PlaceholderTokens]] = deque()
        self._outputs: dict[int, ModelRunnerOutput] = {}

    def replace_placeholders(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Puts tokens in the place of marks.

        Args:
            token_ids: int32 [T] on the device.
        """
        rows = (-1 - token_ids).clamp_(min=0)
        return torch.where(token_ids < 0, self._last_token_ids.index_select(0, rows), token_ids)

    def store(self, sampled: SamplerOutput, rows: torch.Tensor) -> None:
        """Remembers the tokens of a step, on the device.

        Args:
            sampled: n tokens.
            rows: int32 [n or more] on the device; the rows they belong to.
        """
        token_ids = sampled.token_ids
        self._last_token_ids.index_copy_(0, rows[: len(token_ids)].long(), token_ids.to(torch.int32))

    def add_step(self, result: StepResult) -> None:
        """Takes a step whose work has been submitted. Its rows have one token more from now on."""
        if result.sampled is not None:
            result.sampled.send_to_host(self._runtime.to_host)
        self._unread_steps.append((result, self._history.append_placeholders(result.rows[result.sampling_positions])))

    def add_failed_step(self, output: ModelRunnerOutput) -> None:
        """Takes a step that has failed for all of its rows, whose tokens nobody will see."""
        self._outputs[output.step] = output

    def read_all_steps(self) -> None:
        """Waits for all steps added so far; then the host knows every token."""
        while self._unread_steps:
            self._read_oldest_step()

    def collect_output(self, step: int) -> ModelRunnerOutput:
        """The output of a step, once it is there. To be called once for each."""
        while step not in self._outputs:
            self._read_oldest_step()
        return self._outputs.pop(step)

    def _read_oldest_step(self) -> None:
        result, places = self._unread_steps.popleft()
        output, tokens = result.read()
        self._history.fill_placeholders(places, tokens)
        self._outputs[result.step] = output
