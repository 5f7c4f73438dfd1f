"""The head of steps in which every row samples greedily, as one function that a platform can capture.

    hidden [T, hidden_size] -> rows that sample [L] -> logits [L, vocab] -> largest logits -> tokens kept for the next
    step, and one tensor for the host

Such a step needs no parameters of its requests, so its work depends on its shape alone. Masks of structured outputs are
one tensor for all rows. All other steps use Sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mvllm.platform.graphs import CompileBackend
from mvllm.sampling.sampler_output import SamplerOutput
from mvllm.sampling.token_masks import unpack_bytes
from mvllm.worker.sampled_token_buffer import SampledTokenBuffer
from mvllm.worker.step_inputs import StepInputs

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM

Argmax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class GreedyHead:
    """The head of one model.

    Args:
        model: The model, with its weights.
        argmax: The operation of that name.
        buffer: Stores the tokens; None where tokens do not stay on the device.
    """

    def __init__(self, model: CausalLM, argmax: Argmax, buffer: SampledTokenBuffer | None) -> None:
        self._model = model
        self._argmax = argmax
        self._buffer = buffer
        self._compiled: Callable[..., torch.Tensor] | None = None

    def compile(self, compiler: CompileBackend) -> bool:
        """Compiles the head; returns whether the platform does that."""
        self._compiled = compiler.compile_head(self.call_head)
        return self._compiled is not None

    def drop_compiled(self) -> None:
        """Drops the compiled function, which refers to the weights."""
        self._compiled = None

    def sample(self, hidden: torch.Tensor, inputs: StepInputs, masks: torch.Tensor | None = None) -> SamplerOutput:
        """The tokens of a step, which are stored in the buffer.

        Args:
            hidden: Result of the model in this step.
            inputs: The step, whose `capture` is set.
            masks: uint8 [L, vocab / 8], device: the tokens that each row may sample; None for all.
        """
        function = self.call_head if self._compiled is None else self._compiled
        packed = function(hidden, inputs.logits_indices, inputs.sample_rows, masks)
        return SamplerOutput.from_packed(packed, int(inputs.num_logits_rows.sum()))

    def call_head(
        self,
        hidden: torch.Tensor,
        logits_indices: torch.Tensor,
        sample_rows: torch.Tensor | None,
        masks: torch.Tensor | None,
    ) -> torch.Tensor:
        """The function that is compiled. Returns float32 [2, L], see SamplerOutput.from_packed."""
        logits = self._model.compute_logits(hidden.index_select(0, logits_indices))
        if masks is not None:
            logits = logits.masked_fill(~unpack_bytes(masks, logits.shape[1]), -torch.inf)
        max_logits, token_ids = self._argmax(logits)
        if self._buffer is not None and sample_rows is not None:
            self._buffer.store_token_ids(token_ids, sample_rows)
        return torch.stack((token_ids.float(), max_logits.float()))
