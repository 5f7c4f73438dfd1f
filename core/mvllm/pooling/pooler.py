"""Pools the last hidden states of prompts, step by step, and computes scores of classification heads.

With chunked prefill a row keeps one partial vector on the device (the sum, the maximum or the first of its states so
far), not the states. Pooling of the last token keeps nothing. Only pooling of all tokens keeps the states, chunk by
chunk.

    step 1   row 3: positions 0-99       sum of 100 states           kept
    step 2   row 3: positions 100-140    + sum of 41 states, / 141   copied to the host
             row 5: positions 0-7        state 7                     copied to the host

A classification head gets all vectors of a step at once, and its scores are copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mvllm.messages.pooling_params import Activation, PoolingParams, PoolingTask, PoolingType
from mvllm.platform.runtime import DeviceRuntime, HostCopy


class PoolingState:
    """The rows with pooling requests, and their partial vectors."""

    def __init__(self) -> None:
        self.params: dict[int, PoolingParams] = {}
        self.partial: dict[int, torch.Tensor | list[torch.Tensor]] = {}

    def set_row(self, row: int, params: PoolingParams | None) -> None:
        """Starts a row; None for a request that generates."""
        if params is not None:
            self.params[row] = params

    def clear_row(self, row: int) -> None:
        """Frees a row."""
        self.params.pop(row, None)
        self.partial.pop(row, None)


@dataclass
class PooledRows:
    """Vectors being copied to the host.

    Attributes:
        positions: Positions in the batch of the rows whose prompts are complete.
        params: Pooling parameters of each.
        copies: float32 [hidden_size], [labels] or [tokens, hidden_size] of each.
    """

    positions: list[int]
    params: list[PoolingParams]
    copies: list[HostCopy]

    def read(self) -> tuple[dict[int, bytes], dict[int, str]]:
        """The vectors by position in the batch, and errors by position. Waits for the device."""
        vectors, errors = {}, {}
        for position, params, copy in zip(self.positions, self.params, self.copies, strict=True):
            vector = postprocess_vector(copy.wait().numpy(), params)
            if vector is None:
                errors[position] = "The model gave a hidden state that is not finite (NaN or infinity)."
            else:
                vectors[position] = vector
        return vectors, errors


def pool_step(
    state: PoolingState,
    runtime: DeviceRuntime,
    hidden: torch.Tensor,
    *,
    rows: Sequence[int],
    starts: Sequence[int],
    firsts: Sequence[int],
    prompt_lens: Sequence[int],
    scores: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> PooledRows:
    """Pools the hidden states of one step.

    Args:
        state: The rows.
        runtime: The device.
        hidden: [T, hidden_size]: hidden states of the step's tokens after the last norm.
        rows: The step's rows in batch order.
        starts: First index of each row's tokens among the T, and the end of the last; one more than rows.
        firsts: Each row's first position in this step.
        prompt_lens: Prompt length of each row.
        scores: The model's head, [n, hidden_size] in the model's dtype to [n, labels]; called for classification rows.
    """
    positions: list[int] = []
    vectors: list[torch.Tensor] = []
    for i, row in enumerate(rows):
        params = state.params.get(row)
        if params is None:
            continue
        begin, end, first = starts[i], starts[i + 1], firsts[i]
        if first == 0:
            state.partial.pop(row, None)
        is_last = first + end - begin == prompt_lens[i]
        if params.pooling_type is PoolingType.LAST and not is_last:
            continue
        vector = _accumulate(state, row, params.pooling_type, hidden[begin:end])
        if is_last:
            positions.append(i)
            vectors.append(_finalize(vector, params.pooling_type, prompt_lens[i]))
        else:
            state.partial[row] = vector
    asked = [state.params[rows[i]] for i in positions]
    scored = [at for at, params in enumerate(asked) if params.task is PoolingTask.CLASSIFY]
    if scored:
        assert scores is not None, "the front end rejects classify requests for models without a head"
        found = scores(torch.stack([vectors[at] for at in scored]).to(hidden.dtype)).float()
        for at, result in zip(scored, found, strict=True):
            vectors[at] = result
    return PooledRows(positions, asked, [runtime.to_host(vector) for vector in vectors])


def make_token_type_ids(
    state: PoolingState, *, rows: Sequence[int], starts: Sequence[int], firsts: Sequence[int], num_tokens: int
) -> np.ndarray | None:
    """Token type ids of a step: 1 for tokens of the prompt's second text, 0 otherwise; int32 [num_tokens].

    Args:
        state: The rows.
        rows, starts, firsts: As for `pool_step`.
        num_tokens: Tokens of the step, padding included.

    Returns:
        None if no prompt of the step has a second text.
    """
    types = None
    for i, row in enumerate(rows):
        params = state.params.get(row)
        if params is not None and params.second_text_start is not None:
            if types is None:
                types = np.zeros(num_tokens, dtype=np.int32)
            types[starts[i] + max(0, params.second_text_start - firsts[i]) : starts[i + 1]] = 1
    return types


def _accumulate(
    state: PoolingState, row: int, kind: PoolingType | None, piece: torch.Tensor
) -> torch.Tensor | list[torch.Tensor]:
    """The partial result of a row with one more chunk of hidden states, `piece`: [tokens, hidden_size]."""
    before = state.partial.get(row)
    match kind:
        case PoolingType.ALL:
            kept = before if isinstance(before, list) else []
            return [*kept, piece.to(torch.float32, copy=True)]
        case PoolingType.MEAN | PoolingType.MEAN_SQRT_LEN:
            vector = piece.to(torch.float32).sum(0)
            return vector + before if isinstance(before, torch.Tensor) else vector
        case PoolingType.MAX:
            vector = piece.to(torch.float32).amax(0)
            return torch.maximum(vector, before) if isinstance(before, torch.Tensor) else vector
        case PoolingType.CLS:
            return before if isinstance(before, torch.Tensor) else piece[0].to(torch.float32, copy=True)
        case _:
            return piece[-1].to(torch.float32, copy=True)


def _finalize(amount: torch.Tensor | list[torch.Tensor], kind: PoolingType | None, num_tokens: int) -> torch.Tensor:
    """The pooled vector of a complete prompt, or the states of all its tokens."""
    if isinstance(amount, list):
        return torch.cat(amount)
    if kind is PoolingType.MEAN:
        return amount / num_tokens
    return amount / num_tokens**0.5 if kind is PoolingType.MEAN_SQRT_LEN else amount


def postprocess_vector(vector: np.ndarray, params: PoolingParams) -> bytes | None:
    """Truncates and normalizes a vector, or applies the activation to scores; None if a value is not finite.

    Args:
        vector: float32 [n], or [tokens, n].

    Returns:
        Bytes of float32, little-endian.
    """
    if params.dimensions is not None:
        vector = vector[..., : params.dimensions]
    if not np.isfinite(vector).all():
        return None
    if params.activation is not Activation.IDENTITY:
        vector = _activate(vector.astype(np.float64), params.activation)
    if params.normalize:
        # float64: squares of float32 values neither overflow nor underflow
        length = np.sqrt(np.square(vector, dtype=np.float64).sum(-1, keepdims=True))
        vector = vector / np.where(length > 0, length, 1.0)
    return vector.astype("<f4").tobytes()


def _activate(values: np.ndarray, how: Activation) -> np.ndarray:
    """Applies an activation: float64 [n] to float64 [n]."""
    match how:
        case Activation.SOFTMAX:
            powers = np.exp(values - values.max())
            return np.asarray(powers / powers.sum())
        case Activation.SIGMOID:
            return np.asarray(0.5 * (1.0 + np.tanh(0.5 * values)))  # does not overflow
        case Activation.TANH:
            return np.tanh(values)
        case _:
            return values
