"""A request for n sequences is n requests for one, with the same prompt; the caller sees one.

With `best_of`, it is so many requests, and the caller sees the best n of them.

The engine core knows only single sequences. It is told that they are siblings, so that they share the prompt's KV
blocks. Every sequence gets an id of the engine's own, a serial number in front of the caller's id, so that an id may be
used again as soon as its request is gone, even while the core still has something to say about the old one.
"""

from __future__ import annotations

import itertools

import msgspec

from mvllm.messages.requests import EngineCoreRequest
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams

_SEED_SPAN = 2**63


class CoreRequestIds:
    """Hands out ids for the engine core, each once.

    Args:
        front_end: What they begin with: where several front ends share a core, each has a name of its own.
    """

    def __init__(self, front_end: str = "") -> None:
        self._front_end = front_end
        self._serial = itertools.count()

    def next(self, request_id: str) -> str:
        """A new id for (one sequence of) the caller's `request_id`."""
        return f"{self._front_end}{next(self._serial)}:{request_id}"


def fan_out(request: EngineCoreRequest, ids: CoreRequestIds) -> list[EngineCoreRequest]:
    """The requests for single sequences that make up `request`, by index. `request` is left as it is."""
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
    """Settings of sequence `index`: its own seed, the prompt's log-probabilities from the first only, and those of its
    tokens, where it is ranked by them."""
    seed = None if params.seed is None else _child_seed(params.seed, index)
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    own = {"n": 1, "best_of": None, "seed": seed, "prompt_logprobs": prompt_logprobs}
    if params.is_ranked:
        own |= {"logprobs": params.logprobs or 0, "output_kind": RequestOutputKind.FINAL_ONLY}
    return msgspec.structs.replace(params, **own)


def _child_seed(seed: int, index: int) -> int:
    """`seed + index`, kept within 64 bits; never -1, which would mean no seed."""
    return seed if index == 0 else (seed + index) % _SEED_SPAN
