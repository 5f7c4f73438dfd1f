"""Reading and writing the state slots of a step, for the references of operations with a state.

A state tensor is [num_slots + 1, ...]: the last row is scratch memory. Request i continues the state of slot
`read_slots[i]`, or zeros if it is -1, and leaves its new state in slot `write_slots[i]`, or in the scratch row if it
is -1. A slot that one request of a call writes is not read by another one.

    step of one token per request      token i belongs to request i; slots are read and written by index, on the device
    other steps                        a loop over the requests, which reads query_start_loc on the host
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

Advance = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(state, *inputs) -> (result, new state)."""


def advance_states(
    one_token: Advance,
    sequence: Advance,
    inputs: tuple[torch.Tensor, ...],
    result: torch.Tensor,
    state: torch.Tensor,
    query_start_loc: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    max_query_len: int,
) -> torch.Tensor:
    """Runs a recurrence over the requests of a step and updates their states in place.

    Args:
        one_token: Advances R states by a token each: states [R, ...] and inputs [R, ...] to results [R, ...] and
            states [R, ...].
        sequence: Advances one state by L tokens: state [...] and inputs [L, ...] to results [L, ...] and state [...].
        inputs: Tensors [T, ...].
        result: Tensor of the result's shape and dtype, zeros; is returned unless the step has one token per request.
        state: [num_slots + 1, ...], updated in place.
        query_start_loc, read_slots, write_slots, max_query_len: As for the operations.

    Returns:
        [T, ...], the dtype of `result`.
    """
    read, write = read_slots.long(), write_slots.long()
    if max_query_len == 1 and len(read) == len(result):
        y, new = one_token(_states(state, read), *inputs)
        state[write] = new.to(state.dtype)
        return y.to(result.dtype)
    bounds = list(pairwise(query_start_loc.tolist()))
    single = [request for request, (start, stop) in enumerate(bounds) if stop - start == 1]
    if single:
        requests = torch.tensor(single, device=state.device)
        tokens = query_start_loc.long()[requests]
        y, new = one_token(_states(state, read[requests]), *(x[tokens] for x in inputs))
        result[tokens] = y.to(result.dtype)
        state[write[requests]] = new.to(state.dtype)
    for request, (start, stop) in enumerate(bounds):
        if stop - start > 1:
            y, new = sequence(_states(state, read[request : request + 1])[0], *(x[start:stop] for x in inputs))
            result[start:stop] = y.to(result.dtype)
            state[write[request : request + 1]] = new.to(state.dtype)
    return result


def _states(state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The states of `slots`; zeros for slot -1, also where the scratch row holds a NaN."""
    is_new = (slots < 0).view(-1, *[1] * (state.dim() - 1))
    return torch.where(is_new, 0.0, state[slots])
