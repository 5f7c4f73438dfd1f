"""min_p, top_k and top_p, each as a threshold on the logits.

All three keep the most probable tokens of a row, so each amounts to a smallest logit that stays, and together to the
largest of these. Two things follow. Tokens that tie with the last one kept stay, too, which makes the result a property
of the row alone: independent of how a device orders equal values and of what else is in the batch. And the only thing
that needs sorted logits is finding a threshold, for the rows that need it: a few candidates where top_k is small, all
of the vocabulary only for top_p without it.

    min_p  peak + temperature * ln(min_p)
    top_k  the k-th largest logit
    top_p  the logit at which the running sum of the largest weights reaches top_p of what min_p and top_k left
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mvllm.sampling.upload import Selection


@dataclass(frozen=True)
class Filters:
    """The filters of n rows; tensors on the device.

    Attributes:
        inv_temperature: float32 [n].
        min_p_gap: float32 [n]; how far below the peak the logits that min_p keeps reach down, <= 0.
        top_k: int64 [n]; tokens that top_k keeps: 1 to vocab.
        top_p: float32 [n].
        narrow: The rows whose top_k is small, and `num_candidates`, which is at least their top_k.
        wide: The rows that need their whole vocabulary sorted.
        any_top_p: Whether top_p < 1 in any row.
    """

    inv_temperature: torch.Tensor
    min_p_gap: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    narrow: Selection
    num_candidates: int
    wide: Selection
    any_top_p: bool


def filtered_weights(logits: torch.Tensor, peaks: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Returns what each token's probability is proportional to, and 0 for those filtered out.

    Args:
        logits: float32 [n, vocab]; left as they are.
        peaks: float32 [n]; the largest logit of each row, finite.
        filters: Of the same rows.

    Returns:
        float32 [n, vocab], between 0 and 1; 1 for the most probable token.
    """
    threshold = peaks + filters.min_p_gap
    if len(filters.narrow):
        threshold = _raise(threshold, logits, peaks, filters, filters.narrow, filters.num_candidates)
    if len(filters.wide):
        threshold = _raise(threshold, logits, peaks, filters, filters.wide, logits.shape[1])
    return _weights(logits, peaks, filters.inv_temperature, threshold)


def _weights(
    logits: torch.Tensor, peaks: torch.Tensor, inv_temperature: torch.Tensor, threshold: torch.Tensor
) -> torch.Tensor:
    weights = (logits - peaks.unsqueeze(1)).mul_(inv_temperature.unsqueeze(1)).exp_()
    return weights.masked_fill_(logits < threshold.unsqueeze(1), 0.0)


def _raise(
    threshold: torch.Tensor,
    all_logits: torch.Tensor,
    all_peaks: torch.Tensor,
    filters: Filters,
    selection: Selection,
    num_candidates: int,
) -> torch.Tensor:
    """Raises the thresholds of the selected rows to where top_k and top_p put them."""
    logits, peaks, lowest = selection.take(all_logits), selection.take(all_peaks), selection.take(threshold)
    top_k, top_p = selection.take(filters.top_k), selection.take(filters.top_p)
    if num_candidates < logits.shape[1]:
        candidates = logits.topk(num_candidates, dim=1).values
    else:
        candidates = logits.sort(dim=1, descending=True).values
    last = (top_k - 1).unsqueeze(1)
    lowest = torch.maximum(lowest, candidates.gather(1, last).squeeze(1))
    if filters.any_top_p:
        inv_temperature = selection.take(filters.inv_temperature)
        # The total counts every token that ties with the k-th, even those that did not get among the candidates.
        total = _weights(logits, peaks, inv_temperature, lowest).sum(dim=1)
        sums = _weights(candidates, peaks, inv_temperature, lowest).cumsum(dim=1)
        reached = (sums < (top_p * total).unsqueeze(1)).sum(dim=1, keepdim=True)
        nucleus = candidates.gather(1, torch.minimum(reached, last)).squeeze(1)
        lowest = torch.where(top_p < 1.0, torch.maximum(lowest, nucleus), lowest)
    return selection.put(threshold, lowest)
