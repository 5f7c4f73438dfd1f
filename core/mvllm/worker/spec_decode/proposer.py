"""Proposers of draft tokens for speculative decoding: the interface, and their construction.

    a step of the served model ──> sampled tokens, hidden states
                                   └ DraftStep ──Proposer.propose──> draft tokens, which the next step verifies

A proposer is the class that `SpeculativeConfig.proposer` names. It may have a model of its own
(`ProposerContext.draft`), which was loaded beside the served model, and whose attention layers share its block tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mvllm.config.draft_method import SpeculativeConfig
from mvllm.config.engine_config import EngineConfig
from mvllm.platform.runtime import DeviceRuntime
from mvllm.sampling.sampler import Sampler
from mvllm.worker.decoder_forward import StepForward
from mvllm.worker.input_batch import InputBatch
from mvllm.worker.model_forward import ModelForward
from mvllm.worker.spec_decode.draft_model import DraftModel, class_of_method
from mvllm.worker.step_inputs import StepInputBuilder, StepInputs

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM


@dataclass(frozen=True)
class DraftStep:
    """A step of the served model whose tokens are known. Every row of the step is in `rows` or in `others`.

    Attributes:
        rows: int64 [n]: distinct; those that get draft tokens.
        others: int64 [m]: rows without draft tokens, because their prompts are not complete, or because each of their
            tokens must be known before the next one is sampled.
        inputs: The inputs of the step. They stay valid until the inputs of another step are built.
        num_tokens: Most draft tokens of a row.
        hidden: [T, hidden_size], compute dtype, device: the hidden states from which logits are computed. They may be
            overwritten by the next step. [0, hidden_size] in steps of a graph platform that gives tokens alone; there
            no method reads them.
        layer_states: [T, n * hidden_size], compute dtype, device: the residual stream before each of
            `SpeculativeConfig.reads_layers`, side by side; None without such layers.
    """

    rows: np.ndarray
    others: np.ndarray
    inputs: StepInputs
    num_tokens: int
    hidden: torch.Tensor
    layer_states: torch.Tensor | None = None


@dataclass(frozen=True)
class ProposerContext:
    """What a proposer is created with, on the last pipeline stage. The KV cache is allocated.

    Attributes:
        config: The engine's configuration.
        settings: Its `speculative`.
        target: The served model.
        draft: The model of the method; None for a method without one.
        rows: The worker's rows; `rows.history` has their tokens.
        block_size: Tokens per KV block.
        runtime: The device.
        forward: The forward pass of the served model.
        make_sampler: Makes a sampler.
        first_state_slot: The state slot of row 0 that only the draft model has; None if it has no states.
    """

    config: EngineConfig
    settings: SpeculativeConfig
    target: CausalLM
    draft: DraftModel | None
    rows: InputBatch
    block_size: int
    runtime: DeviceRuntime
    forward: ModelForward
    make_sampler: Callable[[], Sampler]
    first_state_slot: int | None = None

    @property
    def own_draft(self) -> DraftModel:
        """The model of the method, which must have one."""
        assert self.draft is not None, f"the method {self.settings.method} has a model"
        return self.draft

    def make_forward(self) -> StepForward:
        """The forward pass of the draft model, compiled as that of the served model is."""
        forward = self.own_draft.forward(self.forward.layers)
        self.forward.compile(forward)
        return forward

    def make_inputs(self, *, token_offset: int = 0, max_draft_tokens: int = 0) -> StepInputBuilder:
        """Builds inputs of steps of the draft model.

        Args:
            token_offset: The token at a position is that so many positions behind it.
            max_draft_tokens: Most positions of a row behind the last known one.
        """
        scheduler, model = self.config.scheduler, self.own_draft.model
        return StepInputBuilder(
            self.rows,
            block_size=self.block_size,
            max_tokens=scheduler.max_num_batched_tokens + scheduler.max_num_seqs * (1 + max_draft_tokens),
            max_rows=scheduler.max_num_seqs,
            runtime=self.runtime,
            shapes=self.forward.shapes(),
            with_prompt_lens=model.uses_prompt_lens,
            max_draft_tokens=max_draft_tokens,
            with_states=bool(model.state_layers()),
            is_causal=True,  # it sees placeholders instead of images, and its limit of tokens may be inside of one
            token_offset=token_offset,
        )


class Proposer(ABC):
    """Proposes draft tokens. Their quality changes the speed of generation, never the tokens.

    Every rank of a tensor-parallel group has a proposer, and with asynchronous scheduling it verifies its own drafts.
    So all ranks must propose the same: what depends on the rows and their steps alone, not on time.

    Args:
        context: See ProposerContext.
    """

    def __init__(self, context: ProposerContext) -> None:
        self.context = context

    def on_requests_added(self, rows: Sequence[int]) -> None:
        """Requests were added to rows, with their cached prefixes. By default nothing happens."""

    def on_requests_removed(self, rows: Sequence[int]) -> None:
        """Requests are about to leave their rows: they have ended or are preempted. By default nothing happens."""

    @abstractmethod
    def propose(self, step: DraftStep) -> list[list[int]]:
        """Proposes draft tokens after a step, for rows that have sampled in it.

        Returns:
            For each of `step.rows` at most `step.num_tokens` tokens, or none.
        """


def make_proposer(
    forward: ModelForward, rows: InputBatch, make_sampler: Callable[[], Sampler], block_size: int
) -> Proposer | None:
    """The proposer of the engine's speculative config; None without one, and on pipeline stages but the last.

    Args:
        forward: The forward pass of the served model. The draft model is compiled as that one is.
        rows: The worker's rows.
        make_sampler: Makes the sampler of a draft model.
        block_size: Tokens per KV block.

    Raises:
        ConfigError: The method names a class that is no Proposer, or cannot be imported.
    """
    settings, draft = forward.config.speculative, forward.loader.draft
    if settings is None or not forward.pipeline.is_last:
        return None
    has_states = draft is not None and bool(draft.model.state_layers())
    return proposer_class(settings)(
        ProposerContext(
            config=forward.config,
            settings=settings,
            target=forward.loader.model,
            draft=draft,
            rows=rows,
            block_size=block_size,
            runtime=forward.runtime,
            forward=forward,
            make_sampler=make_sampler,
            first_state_slot=forward.layers.states.num_slots if has_states else None,
        )
    )


def proposer_class(settings: SpeculativeConfig) -> type[Proposer]:
    """Imports the class that a method names as its proposer. Raises as `class_of_method`."""
    return class_of_method(settings, settings.proposer, Proposer, "draft_heads.Proposer")
