"""min_p, top_k and top_p, each as a threshold on the logits.

Each filter keeps the most probable tokens of a row, so each is a lower bound on the logits, and together they are the
largest bound. Two things follow. Tokens that tie with the last one kept are kept too, so that the result depends on the
row alone, not on the order in which a device returns ties or on other rows. And no vocabulary is ever sorted:

    min_p  max logit + temperature * ln(min_p)
    top_k  the k-th largest logit, the last of k candidates
    top_p  the largest logit such that greater ones have top_p of the mass that min_p and top_k left: among the top_k
           candidates if there are any, otherwise by bisection. 24 passes of three cheap operations over the vocabulary
           are faster than sorting it (20 times on a CPU core), and take the same time for every distribution.

If the candidates of a small top_k contain all kept tokens, which they do unless dozens of tokens tie with the last one,
no other weight is computed. Checking that waits for the device, so it is done only with `may_synchronize`. A row gets
the same weights either way.

Bisection starts with an interval of temperature * ln(vocab / (1 - top_p)) below the largest logit, because the tokens
below that cannot sum to 1 - top_p. It ends where float32 cannot distinguish the probabilities of two logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mvllm.sampling.batch_upload import RowSelection

_NUM_BISECTIONS = 24
_MIN_CANDIDATES = 64
_BLOCK = 64


def next_power_of_two(sizes: np.ndarray | int) -> np.ndarray:
    """int64: the smallest powers of two that are at least `sizes`, which are at least 1."""
    _, bit_lengths = np.frexp(np.asarray(sizes) - 1)
    return np.left_shift(np.int64(1), bit_lengths.astype(np.int64))


def num_candidates(top_k: np.ndarray) -> np.ndarray:
    """Candidates for each `top_k`, int64: the next power of two, so that a compiler sees few sizes."""
    return np.maximum(_MIN_CANDIDATES, next_power_of_two(top_k))


@dataclass(frozen=True)
class Filters:
    """The filters of n rows; tensors on the device, float32 [n] unless noted.

    Attributes:
        inv_temperature: 1 / temperature.
        min_p_gap: Distance <= 0 from the largest logit to the smallest one that min_p keeps; -inf if off.
        top_k: int64 [n]; tokens that top_k keeps: 1 to vocab.
        top_p: 1 if off.
        top_p_gap: Lower bound <= 0 on the distance from the largest logit to the smallest one that top_p keeps.
        small_top_k: The rows with a small top_k. Their `num_candidates` largest logits are examined, at least top_k.
        row_candidates: int64 [n]; candidates that each row needs by itself.
        has_small_top_k_and_top_p: Whether one of the rows with a small top_k has top_p too.
        large_top_k: The rows with a large top_k, with `num_large_top_k_candidates`.
        top_p_rows: The rows with top_p and without a small top_k.
        any: Whether any row has a filter.
        may_synchronize: The host may wait for the device to decide what to compute.
    """

    inv_temperature: torch.Tensor
    min_p_gap: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    top_p_gap: torch.Tensor
    small_top_k: RowSelection
    row_candidates: torch.Tensor
    num_candidates: int
    has_small_top_k_and_top_p: bool
    large_top_k: RowSelection
    num_large_top_k_candidates: int
    top_p_rows: RowSelection
    any: bool = True
    may_synchronize: bool = False


def filtered_weights(logits: torch.Tensor, max_logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Unnormalized probabilities of the tokens; 0 for filtered ones.

    Args:
        logits: float32 [n, vocab]; not changed.
        max_logits: float32 [n]; the largest logit of each row, finite.
        filters: Of the same rows.

    Returns:
        float32 [n, vocab], between 0 and 1; 1 for the most probable token.
    """
    threshold = max_logits + filters.min_p_gap
    small_top_k = _SmallTopK(threshold, logits, max_logits, filters) if len(filters.small_top_k) else None
    if (
        small_top_k is not None
        and filters.may_synchronize
        and len(filters.small_top_k) == len(logits)
        and bool(small_top_k.is_all.all())
    ):
        return small_top_k.weights_alone(logits)
    weights = _weights(logits, max_logits, filters.inv_temperature)
    if not filters.any:
        return weights
    if small_top_k is not None:
        threshold = small_top_k.apply(threshold, logits, weights)
    if len(filters.large_top_k):
        threshold = _apply_top_k(threshold, logits, filters)
    if len(filters.top_p_rows):
        threshold = _apply_top_p(threshold, logits, weights, max_logits, filters)
    return weights.mul_(_reaches(logits, threshold))


def _weights(logits: torch.Tensor, max_logits: torch.Tensor, inv_temperature: torch.Tensor) -> torch.Tensor:
    return (logits - max_logits.unsqueeze(1)).mul_(inv_temperature.unsqueeze(1)).exp_()


def _reaches(logits: torch.Tensor, threshold: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """1.0 where a logit reaches its row's threshold, otherwise 0.0. Multiplying is much faster than a boolean mask."""
    out = torch.empty_like(logits) if out is None else out
    return torch.ge(logits, threshold.unsqueeze(1), out=out)


class _SmallTopK:
    """The rows with a small top_k, of which only the largest logits are examined.

    Attributes:
        is_all: bool [m]; whether the candidates contain every token that top_k and min_p keep.
    """

    def __init__(
        self, threshold: torch.Tensor, logits: torch.Tensor, max_logits: torch.Tensor, filters: Filters
    ) -> None:
        rows = self._rows = filters.small_top_k
        self._filters = filters
        self._values, self._ids = _largest(rows.gather(logits), filters.num_candidates)
        self._last = (rows.gather(filters.top_k) - 1).unsqueeze(1)
        self._lowest = torch.maximum(rows.gather(threshold), self._values.gather(1, self._last).squeeze(1))
        last_candidate = rows.gather(filters.row_candidates).unsqueeze(1) - 1  # independent of other rows
        self.is_all = self._values.gather(1, last_candidate).squeeze(1) < self._lowest
        weights = _weights(self._values, rows.gather(max_logits), rows.gather(filters.inv_temperature))
        self._weights = weights.mul_(_reaches(self._values, self._lowest))

    def weights_alone(self, logits: torch.Tensor) -> torch.Tensor:
        """The weights if `is_all` holds in every row and every row has a small top_k."""
        kept = self._weights
        if self._filters.has_small_top_k_and_top_p:
            sums = kept.cumsum(dim=1)
            kept = kept * _reaches(self._values, self._nucleus(sums, sums[:, -1]))
        ids = self._ids.clamp(max=logits.shape[1] - 1)  # padding of small vocabularies has weight 0
        return torch.zeros_like(logits).scatter_add_(1, ids, kept)

    def apply(self, threshold: torch.Tensor, logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`threshold`, raised to the filters of these rows."""
        lowest = self._lowest
        if self._filters.has_small_top_k_and_top_p:
            sums = self._weights.cumsum(dim=1)
            # The total includes tokens that tie with the k-th and are not among the candidates.
            total = _reaches(self._rows.gather(logits), lowest).mul_(self._rows.gather(weights)).sum(dim=1)
            lowest = self._nucleus(sums, torch.where(self.is_all, sums[:, -1], total))
        return self._rows.scatter(threshold, lowest)

    def _nucleus(self, sums: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        top_p = self._rows.gather(self._filters.top_p)
        reached = (sums < (top_p * total).unsqueeze(1)).sum(dim=1, keepdim=True)
        nucleus = self._values.gather(1, torch.minimum(reached, self._last)).squeeze(1)
        return torch.where(top_p < 1.0, torch.maximum(self._lowest, nucleus), self._lowest)


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest logits of each row in falling order, and their ids.

    They are in the `count` blocks with the largest maxima: every logit elsewhere has at least `count` logits that are
    no smaller. So only the maxima of blocks are computed for most of the vocabulary.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size < 4 * count * _BLOCK:
        values, ids = logits.topk(count, dim=1)
        return values, ids
    padding = -vocab_size % _BLOCK
    padded = torch.nn.functional.pad(logits, (0, padding), value=-torch.inf) if padding else logits
    blocks = padded.view(num_rows, -1, _BLOCK)
    chosen = blocks.amax(dim=2).topk(count, dim=1, sorted=False).indices
    candidates = blocks.gather(1, chosen.unsqueeze(2).expand(-1, -1, _BLOCK)).view(num_rows, -1)
    values, indices = candidates.topk(count, dim=1)
    return values, chosen.gather(1, indices // _BLOCK) * _BLOCK + indices % _BLOCK


def _apply_top_k(threshold: torch.Tensor, logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Raises thresholds to a large top_k."""
    rows = filters.large_top_k
    candidates = rows.gather(logits).topk(filters.num_large_top_k_candidates, dim=1).values
    # Clamped for rows that the selection computes but does not choose.
    last = (rows.gather(filters.top_k) - 1).clamp(max=filters.num_large_top_k_candidates - 1)
    kth = candidates.gather(1, last.unsqueeze(1)).squeeze(1)
    return rows.scatter(threshold, torch.maximum(rows.gather(threshold), kth))


def _apply_top_p(
    threshold: torch.Tensor, logits: torch.Tensor, weights: torch.Tensor, max_logits: torch.Tensor, filters: Filters
) -> torch.Tensor:
    """Raises thresholds to top_p by bisection: the mass of the logits from `low` on is always enough."""
    rows = filters.top_p_rows
    logits, weights, before = rows.gather(logits), rows.gather(weights), rows.gather(threshold)
    buffer = torch.empty_like(logits)
    enough = rows.gather(filters.top_p) * _reaches(logits, before, out=buffer).mul_(weights).sum(dim=1)
    low, high = torch.maximum(before, rows.gather(max_logits) + rows.gather(filters.top_p_gap)), rows.gather(max_logits)
    for _ in range(_NUM_BISECTIONS):
        middle = low + (high - low) * 0.5
        is_enough = _reaches(logits, middle, out=buffer).mul_(weights).sum(dim=1) >= enough
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
    return rows.scatter(threshold, low)
