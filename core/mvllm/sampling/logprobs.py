"""Log-probabilities at sampled and prompt tokens: of the model's own distribution, unless `logprobs_mode` differs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mvllm.messages.requests import PositionLogprobs
from mvllm.ops.logsumexp import logsumexp as reference_logsumexp

LogSumExp = Callable[[torch.Tensor], torch.Tensor]
"""The operation `logsumexp`."""

_CHUNK_ELEMENTS = 1 << 24
"""Logits converted to float32 at a time, which bounds the memory for long prompts and large vocabularies."""


def gather_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_logprobs: int,
    logsumexp: LogSumExp = reference_logsumexp,
    *,
    as_logits: bool = False,
) -> torch.Tensor:
    """Computes log-probabilities on the device, for `read_logprobs`. Does not wait for the device.

    Args:
        logits: [m, vocab], any floating dtype.
        token_ids: int64 [m]; the token at each position.
        num_logprobs: Most probable tokens to add, 0 to vocab.
        logsumexp: The operation of that name.
        as_logits: Return logits in place of log-probabilities.

    Returns:
        float32 [m, 2 + 2 * num_logprobs]: the token's log-probability, its rank, then the log-probabilities and the
        ids of the most probable tokens in falling order, lower ids first where they tie.
    """
    floats = logits.float()
    values, normalizer, scratch = floats, None, None
    if not as_logits and logsumexp is reference_logsumexp:
        # One pass over each row, where logsumexp has one per operation.
        values = scratch = floats.log_softmax(dim=1)
    elif not as_logits:
        normalizer = logsumexp(logits).unsqueeze(1)

    def values_at(ids: torch.Tensor) -> torch.Tensor:
        found = values.gather(1, ids)
        return found if normalizer is None else found - normalizer

    chosen_ids = token_ids.unsqueeze(1)
    parts = [values_at(chosen_ids)]
    most: list[torch.Tensor] = []
    if num_logprobs:
        ids = _most_probable(floats, num_logprobs)
        most = [values_at(ids), ids.float()]
    # Directly as float32: faster than a boolean, and exact for every vocabulary size. In the memory of the
    # log-probabilities, which have been read, if there is one.
    out = torch.empty_like(floats) if scratch is None else scratch
    is_above = torch.gt(floats, floats.gather(1, chosen_ids), out=out)
    parts.append(is_above.sum(dim=1, keepdim=True) + 1.0)
    return torch.cat(parts + most, dim=1)


def read_logprobs(gathered: np.ndarray, token_ids: list[int], num_logprobs: list[int]) -> list[PositionLogprobs]:
    """The PositionLogprobs of some positions.

    Args:
        gathered: float32 [m, ...]: a result of `gather_logprobs`, on the host.
        token_ids: The token at each position.
        num_logprobs: How many of the most probable tokens to keep at each.
    """
    most = (gathered.shape[1] - 2) // 2
    chosen, ranks = gathered[:, 0].tolist(), gathered[:, 1].astype(np.int64).tolist()
    if not any(num_logprobs):  # as nearly always with many positions
        return [PositionLogprobs([i], [value], rank) for i, value, rank in zip(token_ids, chosen, ranks, strict=True)]
    values, ids = gathered[:, 2 : 2 + most].tolist(), gathered[:, 2 + most :].astype(np.int64).tolist()
    return [
        PositionLogprobs([token_ids[i], *ids[i][:count]], [chosen[i], *values[i][:count]], ranks[i])
        for i, count in enumerate(num_logprobs)
    ]


def gather_prompt_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int, logsumexp: LogSumExp = reference_logsumexp
) -> torch.Tensor:
    """Computes log-probabilities of given tokens on the device. Does not wait for the device.

    Args:
        logits: [m, vocab], any floating dtype; row i predicts token i.
        token_ids: int64 [m] on the same device.
        num_logprobs: Most probable tokens to add to each; -1, or more than the vocabulary, for the whole vocabulary.
        logsumexp: The operation of that name.

    Returns:
        float32 [m, ...], as `gather_logprobs`.
    """
    vocab_size = logits.shape[1]
    count = vocab_size if num_logprobs == -1 else min(num_logprobs, vocab_size)
    chunk = max(1, _CHUNK_ELEMENTS // vocab_size)
    parts = zip(logits.split(chunk), token_ids.split(chunk), strict=True)
    return torch.cat([gather_logprobs(some_logits, some_ids, count, logsumexp) for some_logits, some_ids in parts])


def read_prompt_logprobs(gathered: np.ndarray, token_ids: np.ndarray) -> list[PositionLogprobs]:
    """The PositionLogprobs of a result of `gather_prompt_logprobs` for `token_ids`, both on the host."""
    count = (gathered.shape[1] - 2) // 2
    return read_logprobs(gathered, token_ids.tolist(), [count] * len(token_ids))


def _most_probable(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the largest logits. Device order of ties is undefined, so a few more are taken and sorted."""
    num_candidates = min(count + 8, logits.shape[1])
    ids = logits.topk(num_candidates, dim=1).indices.sort(dim=1).values
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)[:, :count]
