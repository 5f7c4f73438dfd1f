"""Grammars of an engine core: compiled on other threads, and given to their requests between two steps."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import partial

from mvllm.config.model import ModelConfig
from mvllm.engine.tokenizer.tokenizer import check_supports_grammars, load_tokenizer
from mvllm.messages.requests import EngineCoreRequest
from mvllm.scheduler.scheduler import Scheduler
from mvllm.structured_output.structured_output_manager import StructuredOutputManager
from mvllm.structured_output.vocabulary import Vocabulary

_WAIT_SECONDS = 0.01
"""The longest wait of a step that has nothing to compute: commands are handled between two waits."""


class Grammars:
    """Starts the compiler with the first request that has a grammar.

    Args:
        model: The model, whose tokens grammars constrain.
        scheduler: Has the requests.
        in_submit: Wait for each grammar in `submit`: ranks that each run a whole engine have to make the same plans.
    """

    def __init__(self, model: ModelConfig, scheduler: Scheduler, *, in_submit: bool) -> None:
        self._model = model
        self._scheduler = scheduler
        self._in_submit = in_submit
        self._manager: StructuredOutputManager | None = None

    def submit(self, request: EngineCoreRequest) -> None:
        """Has the grammar of a request in the scheduler compiled; the request waits, the engine does not."""
        if self._manager is None:
            self._manager = StructuredOutputManager(
                partial(load_vocabulary, self._model), deterministic_timing=self._in_submit
            )
        self._manager.submit(request)
        while self._in_submit and self._scheduler.is_waiting_for_grammar(request.request_id):
            self._manager.wait(_WAIT_SECONDS)
            self._apply(self._manager)

    def begin_step(self, *, is_idle: bool) -> bool:
        """Gives compiled grammars to their requests, or fails those. Returns whether nothing is left to do but to wait
        for grammars.

        Args:
            is_idle: No step is in flight. Then it waits for a grammar if no other work is left.
        """
        if self._manager is None:
            return False
        self._manager.begin_step()
        if is_idle and self._scheduler.is_waiting_for_masks:
            self._manager.wait(_WAIT_SECONDS)
        self._apply(self._manager)
        return is_idle and self._scheduler.is_waiting_for_masks

    def compute_deferred_masks(self) -> None:
        """Computes masks that depend on the tokens of the step that was collected last."""
        if self._manager is not None:
            self._manager.compute_deferred_masks()

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Drops what is compiled for requests that have ended. Unknown ids are ignored."""
        if self._manager is not None:
            self._manager.cancel(request_ids)

    def shutdown(self) -> None:
        """Ends the compiler. Idempotent."""
        if self._manager is not None:
            self._manager.shutdown()

    def _apply(self, manager: StructuredOutputManager) -> None:
        for outcome in manager.pop_results():
            if outcome.error is not None:
                self._scheduler.fail_request(outcome.request_id, outcome.error, outcome.parameter, outcome.grammar)
            elif outcome.grammar is not None:
                self._scheduler.start_grammar(outcome.request_id, outcome.grammar)


def load_vocabulary(config: ModelConfig) -> Vocabulary:
    """Loads the model's tokenizer and serializes it for the grammar library.

    Raises:
        RequestError: Structured outputs do not support this tokenizer.
    """
    tokenizer = load_tokenizer(config)
    check_supports_grammars(tokenizer)
    assert tokenizer is not None
    backend = deepcopy(tokenizer.backend)
    backend.no_padding()
    backend.no_truncation()
    eos = tokenizer.eos_token_id
    ends = [*config.eos_token_ids, *([] if eos is None else [eos])]
    return Vocabulary(
        tokenizer=backend.to_str(),
        vocab_size=config.vocab_size,
        end_ids=sorted({token for token in ends if 0 <= token < min(config.vocab_size, tokenizer.length)}),
    )
