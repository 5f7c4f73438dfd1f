"""What one step has computed, before anybody has looked at it: reading it is what waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mvllm.messages.requests import PositionLogprobs
from mvllm.messages.scheduler_output import ModelRunnerOutput
from mvllm.platform.runtime import HostCopy
from mvllm.pooling.pooler import PooledRows
from mvllm.sampling.logprobs import read_prompt_logprobs
from mvllm.sampling.sampler_output import SamplerOutput


@dataclass
class PromptLogprobsChunk:
    """Log-probabilities of some tokens of one prompt: a copy under way, and the tokens, int64 [m] on the host."""

    gathered: HostCopy
    token_ids: np.ndarray

    def read(self) -> list[PositionLogprobs]:
        """The structs, once the copy is done."""
        return read_prompt_logprobs(self.gathered.wait().numpy(), self.token_ids)


@dataclass
class StepResult:
    """One step's samples and log-probabilities.

    Attributes:
        step: The plan's step.
        rows: int64 [R]: the rows in batch order.
        sampling_positions: int64 [S]: positions among them of the rows that sample.
        sampled: For those rows; None where there are none. Where guesses were checked, it has a line for each row and
            for each guess, see StepInputs.
        draft_token_ids: The guesses that were checked, by position in the batch.
        prompt_logprobs_chunks: By position in the batch, for rows that asked for log-probabilities of their prompt.
        pooled: Vectors of prompts, where some have been computed to the end.
    """

    step: int
    rows: np.ndarray
    sampling_positions: np.ndarray
    sampled: SamplerOutput | None = None
    prompt_logprobs_chunks: dict[int, list[PromptLogprobsChunk]] = field(default_factory=dict)
    pooled: PooledRows | None = None
    draft_token_ids: dict[int, list[int]] = field(default_factory=dict)

    def read(self) -> tuple[ModelRunnerOutput, np.ndarray]:
        """The output, and the tokens of the sampling rows, int64 [S], without those behind guesses."""
        output, at = ModelRunnerOutput(step=self.step), self.sampling_positions
        sampled_ids = np.empty(0, dtype=np.int64)
        if self.sampled is not None and self.draft_token_ids:
            sampled_ids = self._read_verified_drafts(self.sampled, output)
        elif self.sampled is not None:
            sampled_ids = self.sampled.numpy()
            output.logprobs = {int(at[i]): entry for i, entry in self.sampled.logprobs.items()}
            output.errors = {int(at[i]): text for i, text in self.sampled.errors.items()}
        tokens = sampled_ids
        if len(at) < len(self.rows):
            tokens = np.full(len(self.rows), -1, dtype=np.int64)
            tokens[at] = sampled_ids
        output.sampled_token_ids = tokens.tolist()
        if self.prompt_logprobs_chunks:
            output.prompt_logprobs = {
                position: [entry for piece in pieces for entry in piece.read()]
                for position, pieces in self.prompt_logprobs_chunks.items()
            }
        if self.pooled is not None:
            output.pooler_output, errors = self.pooled.read()
            output.errors = {**output.errors, **errors}
        return output, sampled_ids

    def _read_verified_drafts(self, sampled: SamplerOutput, output: ModelRunnerOutput) -> np.ndarray:
        """Compares guesses with samples, and puts into the output what follows from it; returns as `read`.

        A guess is right where it is what the model's logits and the request's settings have given in its place. So the
        tokens are those that would have come one by one.

        A line that failed behind a right guess ends the run before it: the request may end there, and if it does not,
        the next step begins with that line, and fails.
        """
        tokens, errors, logprobs = sampled.tolist(), sampled.errors, sampled.logprobs
        first = np.empty(len(self.sampling_positions), dtype=np.int64)
        line = 0
        for i, position in enumerate(self.sampling_positions.tolist()):
            drafts = self.draft_token_ids.get(position, ())
            first[i], last = tokens[line], line
            if line in errors:
                output.errors[position] = errors[line]
            else:
                while last - line < len(drafts) and tokens[last] == drafts[last - line] and last + 1 not in errors:
                    last += 1
            if last > line:
                output.further_token_ids[position] = tokens[line + 1 : last + 1]
            if line in logprobs:
                output.logprobs[position] = logprobs[line]
                if last > line:
                    output.further_logprobs[position] = [logprobs[each] for each in range(line + 1, last + 1)]
            line += len(drafts) + 1
        return first
