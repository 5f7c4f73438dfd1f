"""Samples steps with request pairs, whose logits are combined first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.staging_buffers import StagingBuffers
from mvllm.sampling.logprobs import LogSumExp
from mvllm.sampling.sampler import Sampler
from mvllm.sampling.sampler_output import SamplerOutput
from mvllm.sampling.sampling_state import LOGPROBS
from mvllm.sampling.token_masks import TokenMasks
from mvllm.worker.input_batch import InputBatch
from mvllm.worker.request_pairs import PairLogits


class PairSampling:
    """The sampler of steps with request pairs. It is made when it is first needed.

    Args:
        runtime: The device.
        make_sampler: Makes a sampler of float32 logits; takes the staging buffers of a step, or None.
        logsumexp: The operation of that name.
        is_static: The platform has static shapes.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        make_sampler: Callable[[StagingBuffers | None], Sampler],
        logsumexp: LogSumExp,
        *,
        is_static: bool,
    ) -> None:
        self._runtime = runtime
        self._make_sampler = make_sampler
        self._logsumexp = logsumexp
        self._is_static = is_static
        self._sampler: Sampler | None = None
        self._rows: InputBatch | None = None
        self._step_staging: StagingBuffers | None = None
        self._own_staging: StagingBuffers | None = None

    def set_rows(self, rows: InputBatch, staging: StagingBuffers | None) -> None:
        """The worker's rows, and the buffers of its steps where sampled tokens stay on the device."""
        self._rows, self._step_staging, self._sampler = rows, staging, None

    def sample(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        pairs: np.ndarray,
        masks: TokenMasks | None,
        seq_lens: np.ndarray | None = None,
    ) -> SamplerOutput:
        """Samples. Arguments as in PairLogits.combine and Sampler.sample; `rows` are the worker's rows of the logits.

        Rows of pairs have no draft tokens.
        """
        assert self._rows is not None
        if self._sampler is None:
            self._sampler = self._make_sampler(self._step_staging)
            self._own_staging = None if self._step_staging is None else StagingBuffers(self._runtime)
        state, own_staging = self._rows.sampling, self._own_staging
        if own_staging is not None:
            own_staging.begin_step()
        state_of_pairs, companions = self._rows.pairs, rows[pairs[1]]
        combined = PairLogits.combine(
            logits,
            pairs,
            state_of_pairs.weight[companions],
            state_of_pairs.groups_of(companions),
            own_staging,
            static=self._is_static,
        )
        if own_staging is not None:
            own_staging.end_step()
        sampled = self._sampler.sample(combined.logits, rows, state, self._rows.history, masks=masks, seq_lens=seq_lens)
        combined.share_tokens(sampled)
        wanted = (state.flags[rows[pairs[0]]] & LOGPROBS).astype(bool)
        if wanted.any():
            combined.add_conditional_logprobs(sampled, pairs[0], wanted, self._logsumexp)
        return sampled
