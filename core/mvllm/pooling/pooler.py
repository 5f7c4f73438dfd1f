"""Makes vectors of prompts, a step at a time.

The idea: a prompt may be computed in pieces, so a row keeps on the device what the pieces so far amount to, one vector
(the sum of the states, or the first of them), and no states. A vector of the last token's state needs nothing kept.

    step 1   row 3: positions 0-99       sum of 100 states           kept
    step 2   row 3: positions 100-140    + sum of 41 states, / 141   goes to the host
             row 5: positions 0-7        state 7                     goes to the host
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mvllm.messages.pooling_params import PoolingParams, PoolingType
from mvllm.platform.runtime import DeviceRuntime, HostCopy


class PoolingState:
    """The rows whose prompts are wanted as vectors, and what is known of these so far."""

    def __init__(self) -> None:
        self.params: dict[int, PoolingParams] = {}
        self.partial: dict[int, torch.Tensor] = {}

    def set_row(self, row: int, params: PoolingParams | None) -> None:
        """Begins a row; with None, one that generates."""
        if params is not None:
            self.params[row] = params

    def clear_row(self, row: int) -> None:
        """Forgets a row."""
        self.params.pop(row, None)
        self.partial.pop(row, None)


@dataclass
class PooledRows:
    """Vectors on their way to the host.

    Attributes:
        positions: Positions in the batch of the rows whose prompts have been computed to the end.
        params: Of each.
        copies: Of each, float32 [hidden_size].
    """

    positions: list[int]
    params: list[PoolingParams]
    copies: list[HostCopy]

    def read(self) -> tuple[dict[int, bytes], dict[int, str]]:
        """The vectors, by position in the batch, and what went wrong with those that are none. Waits for the device."""
        vectors, errors = {}, {}
        for position, params, copy in zip(self.positions, self.params, self.copies, strict=True):
            vector = finish_vector(copy.wait().numpy().reshape(-1), params)
            if vector is None:
                errors[position] = "The model gave a hidden state that is not finite (NaN or infinity)."
            else:
                vectors[position] = vector
        return vectors, errors


def pool(
    state: PoolingState,
    runtime: DeviceRuntime,
    hidden: torch.Tensor,
    *,
    rows: Sequence[int],
    starts: Sequence[int],
    firsts: Sequence[int],
    prompt_lens: Sequence[int],
) -> PooledRows:
    """Takes in the states of one step.

    Args:
        state: The rows.
        runtime: The device.
        hidden: [T, hidden_size]: the states of the step's tokens, as they come out of the last norm.
        rows: The step's rows in batch order.
        starts: Where each row's tokens begin among the T, and where the last ends; one more than rows.
        firsts: Each row's first position in this step.
        prompt_lens: Tokens of each row's prompt.
    """
    found = PooledRows([], [], [])
    for i, row in enumerate(rows):
        params = state.params.get(row)
        if params is None:
            continue
        begin, end, first = starts[i], starts[i + 1], firsts[i]
        is_last = first + end - begin == prompt_lens[i]
        match params.pooling_type:
            case PoolingType.MEAN:
                vector = hidden[begin:end].to(torch.float32).sum(0)
                vector = vector if first == 0 else state.partial[row] + vector
                if is_last:
                    vector = vector / prompt_lens[i]
            case PoolingType.CLS:
                vector = hidden[begin].to(torch.float32, copy=True) if first == 0 else state.partial[row]
            case _:
                if not is_last:
                    continue
                vector = hidden[end - 1].to(torch.float32, copy=True)
        if is_last:
            found.positions.append(i)
            found.params.append(params)
            found.copies.append(runtime.to_host(vector))
        else:
            state.partial[row] = vector
    return found


def finish_vector(vector: np.ndarray, params: PoolingParams) -> bytes | None:
    """Cuts and scales a vector; None where it is not finite.

    Args:
        vector: float32 [n].

    Returns:
        float32 in little-endian order.
    """
    if params.dimensions is not None:
        vector = vector[: params.dimensions]
    if not np.isfinite(vector).all():
        return None
    if params.normalize:
        # float64, where no square of a float32 overflows or vanishes
        length = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
        vector = vector / length if length > 0 else vector
    return vector.astype("<f4").tobytes()
