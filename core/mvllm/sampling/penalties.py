"""Repetition, frequency and presence penalties.

For each token in the prompt or the output, the repetition penalty divides a positive logit and multiplies a negative
one; then `frequency * (times generated) + presence * (generated at all)` is subtracted.

Two implementations give the same logits, bit for bit. Where the host reads the tokens of each step, it counts them
(TokenCounts), and only logits of tokens that occur are changed: their ids, factors and amounts go to the device as flat
lists. Where tokens stay on the device, they are counted there (DeviceTokenCounts), and no step waits for the tokens of
another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from mvllm.sampling.token_history import TokenHistory

_ELEMENTS_AT_ONCE = 1 << 25
"""Logits penalized at a time on the device, which bounds the memory of intermediate results."""


class TokenCounts:
    """How often each distinct token of one sequence was generated; 0 for tokens that only the prompt contains.

    Updated token by token: counting a long history in each step would cost more than the step.
    """

    def __init__(self) -> None:
        self._slot_of_token: dict[int, int] = {}
        self._token_ids = np.empty(64, dtype=np.int32)
        self._counts = np.zeros(64, dtype=np.int32)
        self._num_counted = 0

    def update(self, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """Counts tokens appended since the last call.

        Args:
            token_ids: int32 [num_tokens]; the whole sequence, whose beginning is unchanged.
            num_prompt_tokens: Length of the prompt.
        """
        done, total = self._num_counted, len(token_ids)
        if total - done == 1 and done >= num_prompt_tokens:  # nearly every step
            self._count(int(token_ids[done]), 1)
            self._num_counted = total
            return
        begin_of_output = min(max(done, num_prompt_tokens), total)
        if done < begin_of_output:
            for token_id in np.unique(token_ids[done:begin_of_output]).tolist():
                self._count(token_id, 0)
        for token_id in token_ids[begin_of_output:].tolist():
            self._count(token_id, 1)
        self._num_counted = total

    def extended_copy(self, token_ids: np.ndarray, num_prompt_tokens: int) -> TokenCounts:
        """Counts of the sequence with draft tokens; arguments as for `update`."""
        extended = TokenCounts()
        extended._slot_of_token = self._slot_of_token.copy()
        extended._token_ids, extended._counts = self._token_ids.copy(), self._counts.copy()
        extended._num_counted = self._num_counted
        extended.update(token_ids, num_prompt_tokens)
        return extended

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [d]: the distinct tokens."""
        return self._token_ids[: len(self._slot_of_token)]

    @property
    def counts(self) -> np.ndarray:
        """int32 [d]: how often each was generated, parallel to `token_ids`."""
        return self._counts[: len(self._slot_of_token)]

    def _count(self, token_id: int, times: int) -> None:
        slot = self._slot_of_token.setdefault(token_id, len(self._slot_of_token))
        if slot == len(self._token_ids):
            self._token_ids = np.concatenate((self._token_ids, np.empty_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._token_ids[slot] = token_id
        self._counts[slot] += times


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    factors: torch.Tensor,
    amounts: torch.Tensor,
) -> None:
    """Changes `logits` in place.

    Args:
        logits: float32 [n, vocab].
        rows, token_ids: int64 [m]; distinct elements of `logits`.
        factors: float32 [m]; repetition penalties.
        amounts: float32 [m]; to subtract after that.
    """
    values = logits[rows, token_ids]
    values = torch.where(values > 0, values / factors, values * factors) - amounts
    largest = torch.finfo(logits.dtype).max
    logits[rows, token_ids] = values.clamp(max=largest)


class DeviceTokenCounts:
    """Prompt tokens and generated-token counts of each row, in a table on the device.

        entry (row, token)     2 * (times generated) + (1 if the prompt contains the token)

    A row is written in the first step that samples for its request, new or resumed after preemption: until then the
    host knows all of its tokens. From then on the device adds each token that it samples. The table is allocated when a
    row first needs it.

    Args:
        empty: Allocates an uninitialized tensor on the device.
        max_rows: Rows are 0 to max_rows - 1; one more row is for padding.
        vocab_size: Tokens in a row of logits.
        max_len: Most tokens of a row.
    """

    def __init__(
        self,
        empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
        max_rows: int,
        vocab_size: int,
        max_len: int,
    ) -> None:
        self._empty = empty
        self._shape = (max_rows + 1, vocab_size)
        self._dtype = torch.int16 if 2 * max_len + 1 <= torch.iinfo(torch.int16).max else torch.int32
        self._table: torch.Tensor | None = None
        self._row_generation = np.zeros(max_rows, dtype=np.int64)

    @property
    def padding_row(self) -> int:
        """The row of padding."""
        return self._shape[0] - 1

    @property
    def is_allocated(self) -> bool:
        """Whether a row has needed the table, so that sampled tokens are counted."""
        return self._table is not None

    def list_new_rows(self, rows: np.ndarray, history: TokenHistory) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Marks rows whose request is not in the table yet as written, and lists their entries for `write_rows`.

        Args:
            rows: int [n], distinct.
            history: Contains all tokens of the new requests.

        Returns:
            Rows, token ids and entries, all int [m], for each distinct token of a new request.
        """
        new = rows[self._row_generation[rows] != history.row_generation[rows]]
        self._row_generation[new] = history.row_generation[new]
        places, entries = [], []
        for row in new.tolist():
            num_prompt, end = int(history.num_prompt_tokens[row]), int(history.num_tokens[row])
            token_ids, index = np.unique(history.token_ids[row, :end], return_inverse=True)
            counts = np.zeros(len(token_ids), dtype=np.int64)
            np.add.at(counts, index[num_prompt:], 2)
            counts[index[:num_prompt]] |= 1
            places.append(token_ids)
            entries.append(counts)
        if not places:
            nothing = np.empty(0, dtype=np.int64)
            return nothing, nothing, nothing
        return new.repeat([len(ids) for ids in places]), np.concatenate(places), np.concatenate(entries)

    def write_rows(self, rows: torch.Tensor, token_ids: torch.Tensor, entries: torch.Tensor) -> None:
        """Writes new rows.

        Args:
            rows, token_ids, entries: int64 [m] on the device, from `list_new_rows`; duplicates are allowed.

        Raises:
            MemoryError: There is no memory for the table.
        """
        table = self._allocated_table
        table.index_fill_(0, rows, 0)
        table.index_put_((rows, token_ids), entries.to(self._dtype))

    def add(self, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Counts a sampled token for each of some rows, with or without penalties.

        Args:
            token_ids: int64 [n] on the device.
            rows: int32 [n or more] on the device; distinct except for the padding row.
        """
        if self._table is not None:
            places = rows[: len(token_ids)].long(), token_ids
            self._table.index_put_(places, self._table[places] + 2)

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        repetition: torch.Tensor,
        frequency: torch.Tensor,
        presence: torch.Tensor,
    ) -> None:
        """Changes `logits` in place.

        Args:
            logits: float32 [n, vocab].
            rows: int64 [n] on the device; the padding row for rows of logits whose result is not used.
            repetition, frequency, presence: float32 [n] on the device.
        """
        table, largest = self._allocated_table, torch.finfo(logits.dtype).max
        size = max(1, _ELEMENTS_AT_ONCE // logits.shape[1])
        for begin in range(0, len(logits), size):
            part = slice(begin, begin + size)
            values, entries = logits[part], table.index_select(0, rows[part])
            factors, generated = repetition[part].unsqueeze(1), entries >> 1
            changed = torch.where(values > 0, values / factors, values * factors)
            amounts = generated.float().mul_(frequency[part].unsqueeze(1))
            amounts += (generated > 0) * presence[part].unsqueeze(1)
            changed.sub_(amounts).clamp_(max=largest)
            values.copy_(torch.where(entries > 0, changed, values))

    def free(self) -> None:
        """Frees the table. No request may have a row."""
        self._table = None
        self._row_generation[:] = 0

    @property
    def _allocated_table(self) -> torch.Tensor:
        if self._table is None:
            self._table = self._empty(self._shape, self._dtype).zero_()
        return self._table
