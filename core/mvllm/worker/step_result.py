"""The result of one step before it is read. Reading waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from mvllm.messages.requests import PositionLogprobs
from mvllm.messages.scheduler_output import ModelRunnerOutput
from mvllm.platform.runtime import HostCopy
from mvllm.pooling.pooler import PooledRows
from mvllm.sampling.logprobs import read_prompt_logprobs
from mvllm.sampling.sampler_output import HostSamplerOutput, SamplerOutput
from mvllm.worker.step_inputs import StepInputs


@dataclass
class PromptLogprobsChunk:
    """Log-probabilities of some tokens of one prompt.

    Attributes:
        gathered: A copy to the host, which may have rows of other prompts.
        start: The first row of these tokens.
        token_ids: int64 [m] on the host.
    """

    gathered: HostCopy
    start: int
    token_ids: np.ndarray

    def read(self) -> list[PositionLogprobs]:
        """Waits for the copy, and returns its entries."""
        rows = self.gathered.wait().numpy()[self.start : self.start + len(self.token_ids)]
        return read_prompt_logprobs(rows, self.token_ids)


@dataclass
class ComputedStep:
    """A step after the forward pass.

    Attributes:
        inputs: Its inputs.
        hidden: Hidden states of all tokens, [T, hidden_size]; None if `sampled` is there.
        states: The hidden states that need logits, as from `ModelForward.compute`.
        sampled: The tokens, where the forward pass has given them.
    """

    inputs: StepInputs
    hidden: torch.Tensor | None = None
    states: torch.Tensor | None = None
    sampled: HostSamplerOutput | None = None


@dataclass
class StepResult:
    """Samples, log-probabilities and pooled vectors of one step.

    Attributes:
        step: The plan's step.
        rows: int64 [R]: the rows in batch order.
        sampling_positions: int64 [S]: positions among them of the rows that sample.
        sampled: Sampled tokens of these rows; None without any. With draft tokens it has one entry per row and one per
            draft token, see StepInputs.
        prompt_logprobs_chunks: By position in the batch, for requests with `prompt_logprobs`.
        pooled: Vectors of pooling requests whose prompts are complete.
        draft_token_ids: The draft tokens that the step verifies, by position in the batch.
        item_errors: By position in the batch, why the embeddings of an item are missing.
        encoder_seconds: As in ModelRunnerOutput.
    """

    step: int
    rows: np.ndarray
    sampling_positions: np.ndarray
    sampled: SamplerOutput | HostSamplerOutput | None = None
    prompt_logprobs_chunks: dict[int, list[PromptLogprobsChunk]] = field(default_factory=dict)
    pooled: PooledRows | None = None
    draft_token_ids: dict[int, list[int]] = field(default_factory=dict)
    item_errors: dict[int, str] = field(default_factory=dict)
    encoder_seconds: float = 0.0

    def read(self) -> tuple[ModelRunnerOutput, np.ndarray]:
        """The output, and the sampled tokens without accepted draft tokens, int64 [S]."""
        output, positions = ModelRunnerOutput(step=self.step), self.sampling_positions
        sampled_ids = np.empty(0, dtype=np.int64)
        if self.sampled is not None and self.draft_token_ids:
            sampled_ids = self._read_verified_drafts(self.sampled, output)
        elif self.sampled is not None:
            sampled_ids = self.sampled.numpy()
            output.logprobs = {int(positions[i]): entry for i, entry in self.sampled.logprobs.items()}
            output.errors = {int(positions[i]): text for i, text in self.sampled.errors.items()}
            if isinstance(self.sampled, SamplerOutput) and self.sampled.conditional_logprobs is not None:
                found = self.sampled.read_conditional_logprobs()
                output.conditional_logprobs = {int(positions[i]): value for i, value in found.items()}
        tokens = sampled_ids
        if len(positions) < len(self.rows):
            tokens = np.full(len(self.rows), -1, dtype=np.int64)
            tokens[positions] = sampled_ids
        output.sampled_token_ids = tokens.tolist()
        if self.prompt_logprobs_chunks:
            output.prompt_logprobs = {
                position: [entry for piece in pieces for entry in piece.read()]
                for position, pieces in self.prompt_logprobs_chunks.items()
            }
        if self.pooled is not None:
            output.pooler_output, errors = self.pooled.read()
            output.errors = {**output.errors, **errors}
        output.encoder_seconds = self.encoder_seconds
        if self.item_errors:
            output.errors = {**output.errors, **self.item_errors}
        return output, sampled_ids

    def _read_verified_drafts(
        self, sampled: SamplerOutput | HostSamplerOutput, output: ModelRunnerOutput
    ) -> np.ndarray:
        """Accepts draft tokens, and adds them to the output. Returns the first sampled token of each row, int64 [S].

        A draft token is accepted if it equals the token sampled at its position. So the tokens are those that would
        have been sampled one by one.

        An error in a row of logits behind an accepted draft token ends the accepted run before it: the request may end
        there. If it does not, the next step begins with that position, and fails.
        """
        tokens, errors, logprobs = sampled.tolist(), sampled.errors, sampled.logprobs
        first = np.empty(len(self.sampling_positions), dtype=np.int64)
        index = 0
        for i, position in enumerate(self.sampling_positions.tolist()):
            drafts = self.draft_token_ids.get(position, ())
            first[i], last = tokens[index], index
            if index in errors:
                output.errors[position] = errors[index]
            else:
                while last - index < len(drafts) and tokens[last] == drafts[last - index] and last + 1 not in errors:
                    last += 1
            if last > index:
                output.further_token_ids[position] = tokens[index + 1 : last + 1]
            if index in logprobs:
                output.logprobs[position] = logprobs[index]
                if last > index:
                    output.further_logprobs[position] = [logprobs[k] for k in range(index + 1, last + 1)]
            index += len(drafts) + 1
        return first
