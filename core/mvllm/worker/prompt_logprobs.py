"""Log-probabilities of prompt tokens, for requests with `prompt_logprobs`.

The positions of all prompts of a step go through the model's head together, in parts of at most 256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from mvllm.platform.runtime import DeviceRuntime, HostCopy
from mvllm.platform.shapes import ShapePolicy
from mvllm.sampling.logprobs import LogSumExp, gather_prompt_logprobs
from mvllm.worker.input_batch import InputBatch
from mvllm.worker.step_inputs import StepInputs
from mvllm.worker.step_result import PromptLogprobsChunk

PromptLogits = Callable[[torch.Tensor, np.ndarray, np.ndarray | None], torch.Tensor]

_CHUNK = 256
"""Prompt positions whose logits exist at one time: [256, vocabulary] rather than [prompt, vocabulary]."""


@dataclass(frozen=True)
class _Positions:
    """Some positions of one prompt.

    Attributes:
        index: Of the prompt, in the batch.
        start: The first row of `hidden`.
        token_ids: int64: the tokens that the positions predict.
        space: The token space of the request, as in `RowSpaces.of`.
    """

    index: int
    start: int
    token_ids: np.ndarray
    space: int

    def head(self, count: int) -> _Positions:
        return replace(self, token_ids=self.token_ids[:count])

    def tail(self, count: int) -> _Positions:
        return replace(self, start=self.start + count, token_ids=self.token_ids[count:])


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
        history = self._rows.history
        found: dict[int, list[PromptLogprobsChunk]] = {}
        starts, spaces = inputs.layout.query_start_loc, self._rows.spaces.of(inputs.rows)
        by_number: dict[int, list[_Positions]] = {}
        for i, row in enumerate(inputs.rows.tolist()):
            wanted = self._rows.prompt_logprobs.get(row)
            first, prompt_len = int(inputs.first_positions[i]), int(history.num_prompt_tokens[row])
            last = min(first + int(inputs.num_scheduled[i]), prompt_len - 1)
            if wanted is None or first >= last:
                continue
            found[i] = []
            targets = history.token_ids[row, first + 1 : last + 1].astype(np.int64)
            space = 0 if spaces is None else int(spaces[i])
            by_number.setdefault(wanted, []).append(_Positions(i, int(starts[i]), targets, space))
        for wanted, positions in by_number.items():
            for part in self._parts(positions):
                gathered, start = self._compute_part(part, hidden, wanted, compute_logits), 0
                for each in part:
                    found[each.index].append(PromptLogprobsChunk(gathered, start, each.token_ids))
                    start += len(each.token_ids)
        return found

    def _parts(self, positions: list[_Positions]) -> Iterator[list[_Positions]]:
        """Splits positions into parts of the rows whose logits exist at one time. Short prompts share a part."""
        size = self._sizes[-1] if self._sizes else _CHUNK
        part: list[_Positions] = []
        room = size
        for each in positions:
            while len(each.token_ids) >= room:
                yield [*part, each.head(room)]
                each, part, room = each.tail(room), [], size
            if len(each.token_ids):
                part.append(each)
                room -= len(each.token_ids)
        if part:
            yield part

    def _compute_part(
        self,
        part: list[_Positions],
        hidden: torch.Tensor,
        num_logprobs: int,
        compute_logits: PromptLogits,
    ) -> HostCopy:
        slices = [hidden[each.start : each.start + len(each.token_ids)] for each in part]
        states = slices[0] if len(slices) == 1 else torch.cat(slices)
        token_ids = np.concatenate([each.token_ids for each in part])
        spaces = None
        if any(each.space for each in part):
            spaces = np.concatenate([np.full(len(each.token_ids), each.space, dtype=np.int32) for each in part])
        padding = ShapePolicy.pad(len(states), self._sizes) - len(states)
        padded = F.pad(states, (0, 0, 0, padding)) if padding else states
        gathered = gather_prompt_logprobs(
            compute_logits(padded, token_ids, spaces)[: len(states)],
            self._runtime.from_numpy(token_ids),
            num_logprobs,
            self._logsumexp,
        )
        return self._runtime.to_host(gathered)
