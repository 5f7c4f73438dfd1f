"""Request pairs in the worker: the logits of a row and of its companion are combined, and both get one token.

    row 2, request    c  ─┐
    row 5, companion  u  ─┴─ LogitsCombiner ─> sample ─> token ─┬─> row 2
                                                                └─> row 5

Both rows are part of the same batch, and both sample in the same step. Penalties, masks and filters apply to the
combined logits, which are float32. The companion's own sample is replaced by the token of its row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mvllm.logging import get_logger
from mvllm.messages.scheduler_output import NewRequestData
from mvllm.ops.logsumexp import logsumexp as reference_logsumexp
from mvllm.platform.staging_buffers import StagingBuffers
from mvllm.sampling.batch_upload import BatchUpload
from mvllm.sampling.filters import next_power_of_two
from mvllm.sampling.logits_combiner import LogitsCombiner, load_combiner
from mvllm.sampling.logprobs import LogSumExp
from mvllm.sampling.sampler_output import ConditionalLogprobs, SamplerOutput

logger = get_logger(__name__)


class PairRows:
    """Which rows are pairs.

    Args:
        max_rows: Most running requests.
        load: Loads a combiner by its name.

    Attributes:
        primary_row: int64 [max_rows]: of a companion the row of its request; -1 for all others.
        weight: float32 [max_rows]: of a companion the weight that its combiner gets.
        number: int32 [max_rows]: of a companion the index of its combiner in `combiners`.
        combiners: The combiners in use so far.
        num_pairs: Pairs among the rows.
    """

    def __init__(self, max_rows: int, load: Callable[[str], LogitsCombiner] = load_combiner) -> None:
        self.primary_row = np.full(max_rows, -1, dtype=np.int64)
        self.weight = np.zeros(max_rows, dtype=np.float32)
        self.number = np.zeros(max_rows, dtype=np.int32)
        self.combiners: list[LogitsCombiner] = []
        self.num_pairs = 0
        self._names: list[str] = []
        self._load = load

    def set_row(self, request: NewRequestData) -> None:
        """Writes the state of a row for a request. Settings that its combiner cannot read fail that request alone.

        Raises:
            ConfigError: Its combiner is not installed.
        """
        row = request.row
        self.clear_row(row)
        if request.guided_row is None:
            return
        if request.combiner not in self._names:
            self.combiners.append(self._load(request.combiner))
            self._names.append(request.combiner)
        self.number[row] = self._names.index(request.combiner)
        self.weight[row] = _weight(self.combiners[self.number[row]], request)
        self.primary_row[row] = request.guided_row
        self.num_pairs += 1

    def clear_row(self, row: int) -> None:
        """Empties a row."""
        if self.num_pairs and self.primary_row[row] >= 0:
            self.primary_row[row] = -1
            self.num_pairs -= 1

    @property
    def rows(self) -> np.ndarray:
        """int64 [2 * num_pairs]: both rows of each pair."""
        companions = np.flatnonzero(self.primary_row >= 0)
        return np.concatenate((companions, self.primary_row[companions]))

    def pairs_of(self, rows: np.ndarray) -> np.ndarray:
        """int64 [2, p]: indices among `rows` of the requests with companions, and of these companions, by combiner.

        Args:
            rows: int [n]: the rows that sample. The rows of a pair always sample together, and are there once.
        """
        companions = np.flatnonzero(self.primary_row[rows] >= 0)
        if len(self.combiners) > 1:
            companions = companions[np.argsort(self.number[rows[companions]], kind="stable")]
        index = np.full(len(self.primary_row), -1, dtype=np.int64)
        index[rows] = np.arange(len(rows))
        primaries = index[self.primary_row[rows[companions]]]
        assert (primaries >= 0).all(), "one side of a request pair samples alone"
        return np.stack((primaries, companions))

    def groups_of(self, companions: np.ndarray) -> list[tuple[LogitsCombiner, int]]:
        """The combiners of pairs, each with the number of its pairs.

        Args:
            companions: int [p]: their rows, in the order of `pairs_of`.
        """
        numbers, counts = np.unique(self.number[companions], return_counts=True)
        return [(self.combiners[number], int(count)) for number, count in zip(numbers, counts, strict=True)]


def _weight(combiner: LogitsCombiner, request: NewRequestData) -> float:
    """The weight of a companion; NaN if the combiner fails, so that the logits of this request are not valid."""
    try:
        return float(combiner.weight(request.combiner_settings))
    except Exception as e:  # noqa: BLE001  (a plugin may raise anything, and the settings may be a client's)
        logger.error("The logits combiner %r fails: %s: %s", request.combiner, type(e).__name__, e)
        return math.nan


@dataclass
class PairLogits:
    """The logits of a step with request pairs.

    Attributes:
        logits: float32 [n, vocab]: of requests with companions the combined logits.
    """

    logits: torch.Tensor
    _own: torch.Tensor  # float32 [p, vocab]: the requests' own logits
    _indices: tuple[torch.Tensor, torch.Tensor]  # int64 [p], requests and companions

    @classmethod
    def combine(
        cls,
        logits: torch.Tensor,
        pairs: np.ndarray,
        weights: np.ndarray,
        groups: list[tuple[LogitsCombiner, int]],
        staging: StagingBuffers | None,
        *,
        static: bool = False,
    ) -> PairLogits:
        """Combines the logits of each pair.

        Args:
            logits: [n, vocab], any floating dtype; may be overwritten.
            pairs: int64 [2, p], at least one, from `PairRows.pairs_of`.
            weights: float32 [p].
            groups: From `PairRows.groups_of`.
            staging: Buffers for the upload, where a step must not wait for the previous one.
            static: Pad the pairs to a power of two, by repeating the last one, so that there are few shapes.
        """
        counts = [count for _, count in groups]
        if static:
            padding = int(next_power_of_two(pairs.shape[1])) - pairs.shape[1]
            pairs = np.pad(pairs, ((0, 0), (0, padding)), mode="edge")
            weights = np.pad(weights, (0, padding), mode="edge")
            counts[-1] += padding
        upload = BatchUpload(staging)
        keys = [upload.add(values) for values in (*pairs, weights)]
        upload.send(logits.device)
        indices = upload.get_ids(keys[0]), upload.get_ids(keys[1])
        logits = logits.float()
        own, other = (logits.index_select(0, index) for index in indices)
        columns = upload.get(keys[2]).unsqueeze(1)
        if len(groups) == 1:
            combined = groups[0][0].combine(own, other, columns)
        else:
            parts = zip(groups, own.split(counts), other.split(counts), columns.split(counts), strict=True)
            combined = torch.cat([combiner.combine(*tensors) for (combiner, _), *tensors in parts])
        # A token outside of the row's token space has -inf on both sides.
        combined = torch.where(own == -torch.inf, own, combined)
        return cls(logits.index_copy_(0, indices[0], combined), own, indices)

    def share_tokens(self, sampled: SamplerOutput) -> None:
        """Gives companions the tokens of their rows, and their errors."""
        primaries, companions = self._indices
        for name in ("token_ids", "max_logits"):
            values = getattr(sampled, name)
            setattr(sampled, name, values.index_copy(0, companions, values.index_select(0, primaries)))

    def add_conditional_logprobs(
        self, sampled: SamplerOutput, rows: np.ndarray, wanted: np.ndarray, logsumexp: LogSumExp = reference_logsumexp
    ) -> None:
        """Adds the log-probabilities of the sampled tokens in the requests' own logits.

        Args:
            rows: int64 [p]: indices of the rows of the requests.
            wanted: bool [p]: those whose requests ask for log-probabilities.
            logsumexp: The operation of that name.
        """
        chosen = sampled.token_ids.index_select(0, self._indices[0]).unsqueeze(1)
        values = self._own.gather(1, chosen).squeeze(1) - logsumexp(self._own)
        sampled.conditional_logprobs = ConditionalLogprobs(rows, wanted, values)
