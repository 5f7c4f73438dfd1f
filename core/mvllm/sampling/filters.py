"""min_p, top_k and top_p, each as a threshold on the logits.

All three keep the most probable tokens of a row, so each amounts to a smallest logit that stays, and together to the
largest of these. Two things follow. Tokens that tie with the last one kept stay, too, which makes the result a property
of the row alone: independent of how a device orders equal values and of what else is in the batch. And no vocabulary is
ever sorted:

    min_p  peak + temperature * ln(min_p)
    top_k  the k-th largest logit, the last of k candidates
    top_p  the largest logit above which lies top_p of the mass that min_p and top_k left: among the candidates where
           there are some, else by bisection. 24 passes of three cheap operations over the vocabulary beat sorting it
           (by 20 times on a processor core), and take the same time whatever the distribution.

Bisection begins with an interval of temperature * ln(vocab / (1 - top_p)) below the peak, since the tokens below that
cannot add up to 1 - top_p. It ends where logits differ by less than float32 can tell apart in their probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mvllm.sampling.upload import Selection

_NUM_BISECTIONS = 24


@dataclass(frozen=True)
class Filters:
    """The filters of n rows; tensors on the device, each float32 [n] but `top_k`.

    Attributes:
        inv_temperature: 1 / temperature.
        min_p_gap: How far below the peak the logits that min_p keeps reach, as a number <= 0; -inf where it is off.
        top_k: int64 [n]; tokens that top_k keeps: 1 to vocab.
        top_p: 1 where it is off.
        top_p_gap: How far below the peak the logits that top_p keeps can reach, as a number <= 0.
        narrow: The rows whose top_k is small; of each, `num_candidates` largest logits are looked at, at least top_k.
        narrow_top_p: Whether any of them has top_p, too.
        broad: The rows whose top_k is large, with `num_broad_candidates`.
        nucleus: The rows with top_p that are not narrow.
    """

    inv_temperature: torch.Tensor
    min_p_gap: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    top_p_gap: torch.Tensor
    narrow: Selection
    num_candidates: int
    narrow_top_p: bool
    broad: Selection
    num_broad_candidates: int
    nucleus: Selection


def filtered_weights(logits: torch.Tensor, peaks: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Returns what each token's probability is proportional to, and 0 for those filtered out.

    Args:
        logits: float32 [n, vocab]; left as they are.
        peaks: float32 [n]; the largest logit of each row, finite.
        filters: Of the same rows.

    Returns:
        float32 [n, vocab], between 0 and 1; 1 for the most probable token.
    """
    weights = _weights(logits, peaks, filters.inv_temperature)
    threshold = peaks + filters.min_p_gap
    if len(filters.narrow):
        threshold = _apply_narrow(threshold, logits, weights, peaks, filters)
    if len(filters.broad):
        threshold = _apply_top_k(threshold, logits, filters)
    if len(filters.nucleus):
        threshold = _apply_top_p(threshold, logits, weights, peaks, filters)
    return weights.mul_(_reaches(logits, threshold))


def _weights(logits: torch.Tensor, peaks: torch.Tensor, inv_temperature: torch.Tensor) -> torch.Tensor:
    return (logits - peaks.unsqueeze(1)).mul_(inv_temperature.unsqueeze(1)).exp_()


def _reaches(logits: torch.Tensor, threshold: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """1.0 where a logit reaches its row's threshold, else 0.0: much quicker to multiply with than a boolean mask."""
    out = torch.empty_like(logits) if out is None else out
    return torch.ge(logits, threshold.unsqueeze(1), out=out)


def _apply_narrow(
    threshold: torch.Tensor, logits: torch.Tensor, weights: torch.Tensor, peaks: torch.Tensor, filters: Filters
) -> torch.Tensor:
    """Raises thresholds to where a small top_k puts them, and then top_p, by looking at the largest logits only."""
    rows = filters.narrow
    logits, top_k = rows.take(logits), rows.take(filters.top_k)
    candidates = logits.topk(filters.num_candidates, dim=1).values
    last = (top_k - 1).unsqueeze(1)
    lowest = torch.maximum(rows.take(threshold), candidates.gather(1, last).squeeze(1))
    if filters.narrow_top_p:
        # The total counts every token that ties with the k-th, even those that did not get among the candidates.
        total = _reaches(logits, lowest).mul_(rows.take(weights)).sum(dim=1)
        sums = _weights(candidates, rows.take(peaks), rows.take(filters.inv_temperature))
        sums = sums.mul_(_reaches(candidates, lowest)).cumsum(dim=1)
        top_p = rows.take(filters.top_p)
        reached = (sums < (top_p * total).unsqueeze(1)).sum(dim=1, keepdim=True)
        nucleus = candidates.gather(1, torch.minimum(reached, last)).squeeze(1)
        lowest = torch.where(top_p < 1.0, torch.maximum(lowest, nucleus), lowest)
    return rows.put(threshold, lowest)


def _apply_top_k(threshold: torch.Tensor, logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Raises thresholds to where a large top_k puts them."""
    rows = filters.broad
    candidates = rows.take(logits).topk(filters.num_broad_candidates, dim=1).values
    kth = candidates.gather(1, (rows.take(filters.top_k) - 1).unsqueeze(1)).squeeze(1)
    return rows.put(threshold, torch.maximum(rows.take(threshold), kth))


def _apply_top_p(
    threshold: torch.Tensor, logits: torch.Tensor, weights: torch.Tensor, peaks: torch.Tensor, filters: Filters
) -> torch.Tensor:
    """Raises thresholds to where top_p puts them, by bisection: what lies at `low` and above always is enough."""
    rows = filters.nucleus
    logits, weights, high = rows.take(logits), rows.take(weights), rows.take(peaks)
    low = torch.maximum(rows.take(threshold), high + rows.take(filters.top_p_gap))
    buffer = torch.empty_like(logits)
    enough = rows.take(filters.top_p) * _reaches(logits, rows.take(threshold), out=buffer).mul_(weights).sum(dim=1)
    for _ in range(_NUM_BISECTIONS):
        middle = low + (high - low) * 0.5
        is_enough = _reaches(logits, middle, out=buffer).mul_(weights).sum(dim=1) >= enough
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
    return rows.put(threshold, low)
