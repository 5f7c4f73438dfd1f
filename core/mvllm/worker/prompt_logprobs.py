"""Log-probabilities of prompt tokens, for requests with `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.shapes import ShapePolicy
from mvllm.sampling.logprobs import LogSumExp, gather_prompt_logprobs
from mvllm.worker.input_batch import InputBatch
from mvllm.worker.step_inputs import StepInputs
from mvllm.worker.step_result import PromptLogprobsChunk

PromptLogits = Callable[[torch.Tensor, np.ndarray], torch.Tensor]

_CHUNK = 256
"""Prompt positions whose logits exist at one time: [256, vocabulary] rather than [prompt, vocabulary]."""


class PromptLogprobsComputer:
    """Computes prompt log-probabilities from the hidden states of a step.

    Args:
        rows: The worker's rows.
        runtime: The device.
        sizes: Padded numbers of rows whose logits are computed at once, rising; None if any size is allowed.
        logsumexp: The operation of that name.
    """

    def __init__(
        self, rows: InputBatch, runtime: DeviceRuntime, sizes: tuple[int, ...] | None, logsumexp: LogSumExp
    ) -> None:
        self._logsumexp = logsumexp
        self._rows = rows
        self._runtime = runtime
        self._sizes = sizes

    def compute(
        self, inputs: StepInputs, hidden: torch.Tensor, compute_logits: PromptLogits
    ) -> dict[int, list[PromptLogprobsChunk]]:
        """Log-probabilities of the prompt tokens that the step's positions predict, by position in the batch.

        Args:
            hidden: [T, hidden_size].
            compute_logits: See ModelForward.prompt_logits.
        """
        history, found = self._rows.history, {}
        starts = inputs.layout.query_start_loc
        chunk = self._sizes[-1] if self._sizes else _CHUNK
        for i, row in enumerate(inputs.rows.tolist()):
            wanted = self._rows.prompt_logprobs.get(row)
            first, prompt_len = int(inputs.first_positions[i]), int(history.num_prompt_tokens[row])
            last = min(first + int(inputs.num_scheduled[i]), prompt_len - 1)
            if wanted is None or first >= last:
                continue
            targets = history.token_ids[row, first + 1 : last + 1].astype(np.int64)
            states = hidden[int(starts[i]) : int(starts[i]) + last - first]
            found[i] = [
                self._compute_chunk(
                    states[begin : begin + chunk], targets[begin : begin + chunk], wanted, compute_logits
                )
                for begin in range(0, len(targets), chunk)
            ]
        return found

    def _compute_chunk(
        self,
        states: torch.Tensor,
        token_ids: np.ndarray,
        num_logprobs: int,
        compute_logits: PromptLogits,
    ) -> PromptLogprobsChunk:
        padding = ShapePolicy.pad(len(states), self._sizes) - len(states)
        padded = F.pad(states, (0, 0, 0, padding)) if padding else states
        gathered = gather_prompt_logprobs(
            compute_logits(padded, token_ids)[: len(states)],
            self._runtime.from_numpy(token_ids),
            num_logprobs,
            self._logsumexp,
        )
        return PromptLogprobsChunk(self._runtime.to_host(gathered), token_ids)
