"""Which of two texts each token of a step belongs to, for encoders that compare them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mvllm.pooling.pooler import PoolingState


def make_token_type_ids(
    state: PoolingState, *, rows: Sequence[int], starts: Sequence[int], firsts: Sequence[int], num_tokens: int
) -> np.ndarray | None:
    """For each token 1 where it belongs to its prompt's second text, else 0: int32 [num_tokens], padding included.

    Args:
        state: The rows.
        rows, starts, firsts: As for `pool`.
        num_tokens: Tokens of the step, padding included.

    Returns:
        None where no prompt of the step has a second text.
    """
    types = None
    for i, row in enumerate(rows):
        params = state.params.get(row)
        if params is not None and params.second_text_start is not None:
            if types is None:
                types = np.zeros(num_tokens, dtype=np.int32)
            types[starts[i] + max(0, params.second_text_start - firsts[i]) : starts[i + 1]] = 1
    return types
