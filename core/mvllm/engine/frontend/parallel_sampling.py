"""Parallel sampling: splits a request for `n` (or `best_of`) sequences into requests for one sequence each.

The engine core handles single sequences only. The sequences of a request share a `sibling_group`, and with it the
prompt's KV blocks. Every sequence has an engine-wide unique id, a serial number before the caller's id, so that a
caller's id can be used again while outputs of the old request are still on their way.
"""

from __future__ import annotations

import itertools

import msgspec

from mvllm.messages.requests import EngineCoreRequest
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams

_SEED_SPAN = 2**63


class CoreRequestIds:
    """Makes unique request ids for the engine core.

    Args:
        front_end: Prefix of the ids; unique per front end if several share a core.
    """

    def __init__(self, front_end: str = "") -> None:
        self._front_end = front_end
        self._serial = itertools.count()

    def next(self, request_id: str) -> str:
        """A new id for one sequence of the caller's request."""
        return f"{self._front_end}{next(self._serial)}:{request_id}"


def fan_out(request: EngineCoreRequest, ids: CoreRequestIds) -> list[EngineCoreRequest]:
    """The single-sequence requests of `request`, by index. `request` is not modified."""
    params = request.sampling_params
    if params.num_sequences == 1:
        return [msgspec.structs.replace(request, request_id=ids.next(request.request_id))]
    group = ids.next(request.request_id)
    return [
        msgspec.structs.replace(
            request,
            request_id=group if index == 0 else ids.next(request.request_id),
            sampling_params=_child_params(params, index),
            sibling_group=group,
        )
        for index in range(params.num_sequences)
    ]


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Settings of sequence `index`: its own seed, prompt log-probabilities for the first sequence only, and token
    log-probabilities if the sequences are ranked by them."""
    seed = None if params.seed is None else child_seed(params.seed, index)
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    changes = {"n": 1, "best_of": None, "seed": seed, "prompt_logprobs": prompt_logprobs}
    if params.is_ranked:
        changes |= {"logprobs": params.logprobs or 0, "output_kind": RequestOutputKind.FINAL_ONLY}
    return msgspec.structs.replace(params, **changes)


def child_seed(seed: int, index: int) -> int:
    """`seed + index` modulo 2**63; never -1, which means no seed."""
    return seed if index == 0 else (seed + index) % _SEED_SPAN
