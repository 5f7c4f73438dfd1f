"""Classifier-free guidance: combines the logits of a row with those of its unconditional companion.

    row 2, conditional    c  ─┐
    row 5, unconditional  u  ─┴─ u + s (c - u) ─> sample ─> token ─┬─> row 2
                                                                   └─> row 5

Both rows are part of the same batch, and both sample in the same step. Penalties, masks and filters apply to the
combined logits, which are float32. The companion's own sample is replaced by the token of its row.

Source: Ho and Salimans, "Classifier-Free Diffusion Guidance" (2022); for language models Sanchez et al., "Stay on topic
with Classifier-Free Guidance" (2023), whose log-probabilities differ from logits by a constant in each row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mvllm.ops.logsumexp import logsumexp as reference_logsumexp
from mvllm.platform.staging_buffers import StagingBuffers
from mvllm.sampling.batch_upload import BatchUpload
from mvllm.sampling.filters import next_power_of_two
from mvllm.sampling.logprobs import LogSumExp
from mvllm.sampling.sampler_output import ConditionalLogprobs, SamplerOutput


class GuidedRows:
    """Which rows are pairs.

    Attributes:
        scale: float32 [max_rows]: `guidance_scale` of the conditional rows.
        guided_row: int64 [max_rows]: of a companion the conditional row; -1 for all others.
        num_pairs: Pairs among the rows.
    """

    def __init__(self, max_rows: int) -> None:
        self.scale = np.ones(max_rows, dtype=np.float32)
        self.guided_row = np.full(max_rows, -1, dtype=np.int64)
        self.num_pairs = 0

    def set_row(self, row: int, scale: float | None, guided_row: int | None) -> None:
        """Writes the state of a row for a request."""
        self.clear_row(row)
        if scale is not None:
            self.scale[row] = scale
        if guided_row is not None:
            self.guided_row[row] = guided_row
            self.num_pairs += 1

    def clear_row(self, row: int) -> None:
        """Empties a row."""
        if self.num_pairs and self.guided_row[row] >= 0:
            self.guided_row[row] = -1
            self.num_pairs -= 1

    def pairs_of(self, rows: np.ndarray) -> np.ndarray:
        """int64 [2, p]: indices among `rows` of the conditional and of the unconditional rows.

        Args:
            rows: int [n]: the rows that sample. The rows of a pair always sample together.
        """
        unconditional = np.flatnonzero(self.guided_row[rows] >= 0)
        index = np.full(len(self.guided_row), -1, dtype=np.int64)
        index[rows] = np.arange(len(rows))
        conditional = index[self.guided_row[rows[unconditional]]]
        assert (conditional >= 0).all(), "one side of a guided request samples alone"
        return np.stack((conditional, unconditional))


@dataclass
class GuidedLogits:
    """The logits of a step with guided rows.

    Attributes:
        logits: float32 [n, vocab]: of guided rows the combined logits.
    """

    logits: torch.Tensor
    _own: torch.Tensor  # float32 [p, vocab]: the conditional logits
    _indices: tuple[torch.Tensor, torch.Tensor]  # int64 [p], conditional and unconditional rows

    @classmethod
    def combine(
        cls,
        logits: torch.Tensor,
        pairs: np.ndarray,
        scale: np.ndarray,
        staging: StagingBuffers | None,
        *,
        static: bool = False,
    ) -> GuidedLogits:
        """Combines the logits of each pair.

        Args:
            logits: [n, vocab], any floating dtype; may be overwritten.
            pairs: int64 [2, p], at least one, from `GuidedRows.pairs_of`.
            scale: float32 [p].
            staging: Buffers for the upload, where a step must not wait for the previous one.
            static: Pad the pairs to a power of two, by repeating the last one, so that there are few shapes.
        """
        if static:
            padding = int(next_power_of_two(pairs.shape[1])) - pairs.shape[1]
            pairs, scale = np.pad(pairs, ((0, 0), (0, padding)), mode="edge"), np.pad(scale, (0, padding), mode="edge")
        upload = BatchUpload(staging)
        keys = [upload.add(values) for values in (*pairs, scale)]
        upload.send(logits.device)
        indices = upload.get_ids(keys[0]), upload.get_ids(keys[1])
        logits = logits.float()
        own, other = (logits.index_select(0, index) for index in indices)
        combined = other + upload.get(keys[2]).unsqueeze(1) * (own - other)
        # A token outside of the row's token space has -inf on both sides.
        combined = torch.where(own == -torch.inf, own, combined)
        return cls(logits.index_copy_(0, indices[0], combined), own, indices)

    def share_tokens(self, sampled: SamplerOutput) -> None:
        """Gives companions the tokens of their rows, and their errors."""
        conditional, unconditional = self._indices
        for name in ("token_ids", "max_logits"):
            values = getattr(sampled, name)
            setattr(sampled, name, values.index_copy(0, unconditional, values.index_select(0, conditional)))

    def add_conditional_logprobs(
        self, sampled: SamplerOutput, rows: np.ndarray, wanted: np.ndarray, logsumexp: LogSumExp = reference_logsumexp
    ) -> None:
        """Adds the log-probabilities of the sampled tokens in the conditional logits.

        Args:
            rows: int64 [p]: indices of the conditional rows.
            wanted: bool [p]: those whose requests ask for log-probabilities.
            logsumexp: The operation of that name.
        """
        chosen = sampled.token_ids.index_select(0, self._indices[0]).unsqueeze(1)
        values = self._own.gather(1, chosen).squeeze(1) - logsumexp(self._own)
        sampled.conditional_logprobs = ConditionalLogprobs(rows, wanted, values)
