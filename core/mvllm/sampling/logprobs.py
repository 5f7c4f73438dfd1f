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
    normalizer: torch.Tensor | float = 0.0 if as_logits else logsumexp(logits).unsqueeze(1)
    logits = logits.float()
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    # Directly as float32: faster than a boolean, and exact for every vocabulary size.
    is_above = torch.gt(logits, chosen, out=torch.empty_like(logits))
    parts = [chosen - normalizer, is_above.sum(dim=1, keepdim=True) + 1.0]
    if num_logprobs:
        values, ids = _most_probable(logits, num_logprobs)
        parts += [values - normalizer, ids.float()]
    return torch.cat(parts, dim=1)


def read_logprobs(gathered: np.ndarray, token_id: int, num_logprobs: int) -> PositionLogprobs:
    """The PositionLogprobs of one position.

    Args:
        gathered: A row of the result of `gather_logprobs`, on the host.
        token_id: The token at the position.
        num_logprobs: How many of the most probable tokens to keep.
    """
    most = (len(gathered) - 2) // 2
    values, ids = gathered[2 : 2 + num_logprobs], gathered[2 + most : 2 + most + num_logprobs]
    return PositionLogprobs(
        token_ids=[token_id, *ids.astype(np.int64).tolist()],
        logprobs=[float(gathered[0]), *values.tolist()],
        rank=int(gathered[1]),
    )


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
    return [read_logprobs(row, token_id, count) for row, token_id in zip(gathered, token_ids.tolist(), strict=True)]


def _most_probable(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits and their ids. Device order of ties is undefined, so a few more are taken and sorted."""
    num_candidates = min(count + 8, logits.shape[1])
    ids = logits.topk(num_candidates, dim=1).indices.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, order)[:, :count]
