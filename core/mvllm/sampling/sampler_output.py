"""The sampled tokens of one step, on the device until they are read.

`send_to_host` starts asynchronous copies: reading then waits for these copies, not for later work of the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from mvllm.messages.requests import NOTHING_TO_SAMPLE, PositionLogprobs
from mvllm.platform.runtime import HostCopy
from mvllm.sampling.logprobs import read_logprobs


@dataclass(frozen=True)
class GatheredLogprobs:
    """Log-probabilities of some rows of a batch.

    Attributes:
        rows: int64 [m] on the host; indices into the batch.
        num_logprobs: int64 [m] on the host; most probable tokens that each row requested.
        gathered: float32 [m, ...] on the device, as from `gather_logprobs`; or of all rows of the batch.
    """

    rows: np.ndarray
    num_logprobs: np.ndarray
    gathered: torch.Tensor


@dataclass(frozen=True)
class ConditionalLogprobs:
    """Log-probabilities of the tokens of rows with companions in the rows' own logits.

    Attributes:
        rows: int64 [m] on the host; indices into the batch.
        wanted: bool [m] on the host; the rows whose requests ask for them.
        values: float32 [m or more] on the device.
    """

    rows: np.ndarray
    wanted: np.ndarray
    values: torch.Tensor


@dataclass(eq=False)
class SamplerOutput:
    """Sampled tokens. `token_ids` is usable on the device at once; reading anything else waits for the device.

    Attributes:
        token_ids: int64 [n] on the device; always valid ids, but meaningless for the rows in `errors`. From
            `from_packed` they are float32.
        max_logits: [n] on the device; the largest logit that each row could choose from. Not finite if the row has
        failed. gathered_logprobs: Log-probabilities, if requested.
        failures: Known errors, by index into the batch.
        conditional_logprobs: Of rows with companions, if requested.
        num_rows: Rows of the batch, if more were computed as padding; None for all of `token_ids`.
    """

    token_ids: torch.Tensor
    max_logits: torch.Tensor
    gathered_logprobs: GatheredLogprobs | None = None
    failures: dict[int, str] = field(default_factory=dict)
    num_rows: int | None = None
    conditional_logprobs: ConditionalLogprobs | None = None
    _copies: list[HostCopy] = field(default_factory=list, init=False, repr=False)
    _packed_ids: torch.Tensor | None = field(default=None, init=False, repr=False)
    _conditional_copy: HostCopy | None = field(default=None, init=False, repr=False)

    @classmethod
    def from_packed(cls, packed: torch.Tensor, num_rows: int) -> SamplerOutput:
        """The output of rows that sampled greedily.

        Args:
            packed: float32 [2, n or more] on the device: token ids and largest logits.
            num_rows: n.
        """
        output = cls(packed[0], packed[1], num_rows=num_rows)
        output._packed_ids = packed
        return output

    def send_to_host(self, to_host: Callable[[torch.Tensor], HostCopy]) -> None:
        """Starts copies of everything that is read on the host."""
        self._copies = [to_host(self._packed())]
        if self.gathered_logprobs is not None:
            self._copies.append(to_host(self.gathered_logprobs.gathered))
        if self.conditional_logprobs is not None:
            self._conditional_copy = to_host(self.conditional_logprobs.values)

    def numpy(self) -> np.ndarray:
        """`token_ids` on the host, int64 [n]."""
        return self._host[0].astype(np.int64)

    def tolist(self) -> list[int]:
        """`token_ids` as Python integers."""
        return self.numpy().tolist()

    @cached_property
    def errors(self) -> dict[int, str]:
        """Error messages of failed rows, by index into the batch."""
        max_logits = self._host[1]
        if math.isfinite(max_logits.sum(dtype=np.float64)):  # nearly always: one pass over the rows
            return self.failures
        return _errors_of(max_logits.tolist()) | self.failures

    @cached_property
    def logprobs(self) -> dict[int, PositionLogprobs]:
        """Log-probabilities by index into the batch, for rows that requested them and have not failed."""
        found = self.gathered_logprobs
        if found is None:
            return {}
        gathered = self._copies[1].wait() if self._copies else found.gathered.cpu()
        token_ids, host = self.tolist(), gathered.numpy()
        if len(host) != len(found.rows):  # computed for all rows
            host = host[found.rows]
        rows, errors = found.rows.tolist(), self.errors
        entries = read_logprobs(host, [token_ids[row] for row in rows], found.num_logprobs.tolist())
        return {row: entry for row, entry in zip(rows, entries, strict=True) if row not in errors}

    def read_conditional_logprobs(self) -> dict[int, float]:
        """Conditional log-probabilities by index into the batch, for rows that requested them and have not failed."""
        found = self.conditional_logprobs
        if found is None:
            return {}
        values = found.values.cpu() if self._conditional_copy is None else self._conditional_copy.wait()
        by_row = zip(found.rows.tolist(), found.wanted.tolist(), values.tolist())  # `values` may be padded
        return {row: value for row, is_wanted, value in by_row if is_wanted and row not in self.errors}

    @cached_property
    def _host(self) -> np.ndarray:
        """float32 [2, n]: token ids and largest logits."""
        return (self._copies[0].wait() if self._copies else self._packed().cpu()).numpy()[:, : self.num_rows]

    def _packed(self) -> torch.Tensor:
        """float32 [2, n] on the device:

        token ids and largest logits in one copy (ids are exact, see MAX_VOCAB_SIZE).
        """
        if self._packed_ids is not None:
            return self._packed_ids
        return torch.stack((self.token_ids.float(), self.max_logits.float()))


class HostSamplerOutput:
    """Tokens of rows that sampled greedily on the host, in the place of a SamplerOutput.

    Args:
        token_ids: int64 [n].
        max_logits: float32 [n].

    Attributes:
        errors, logprobs, conditional_logprobs: As of SamplerOutput.
    """

    conditional_logprobs = None

    def __init__(self, token_ids: np.ndarray, max_logits: np.ndarray) -> None:
        self._token_ids = token_ids
        self.errors = _errors_of(max_logits.tolist())
        self.logprobs: dict[int, PositionLogprobs] = {}

    def send_to_host(self, to_host: Callable[[torch.Tensor], HostCopy]) -> None:
        """Does nothing: the tokens are there."""

    def numpy(self) -> np.ndarray:
        """The tokens, int64 [n]."""
        return self._token_ids

    def tolist(self) -> list[int]:
        """The tokens as Python integers."""
        return self._token_ids.tolist()


def _errors_of(max_logits: list[float]) -> dict[int, str]:
    """Error messages of the rows whose largest logits are not finite."""
    return {i: _invalid_logits_message(each) for i, each in enumerate(max_logits) if not math.isfinite(each)}


def _invalid_logits_message(max_logit: float) -> str:
    if math.isnan(max_logit):
        return "the model produced NaN logits for this request"
    if max_logit > 0:
        return "the model produced infinite logits for this request"
    return NOTHING_TO_SAMPLE
