"""An engine-core client without a model: the test chooses the generated tokens of each prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mvllm.config.engine_config import EngineConfig, SchedulerConfig
from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.messages.commands import ResetPrefixCache
from mvllm.messages.requests import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PositionLogprobs,
)

Answer = Callable[[EngineCoreRequest], Sequence[int]]


def make_config(
    *, vocab_size: int = 500, max_model_len: int = 256, tokenizer: str | None = None, policy: str = "fcfs", **model: Any
) -> EngineConfig:
    """An EngineConfig of a model that does not exist."""
    return EngineConfig(
        model=ModelConfig(
            model="fake",
            path=Path("fake"),
            tokenizer=tokenizer,
            hf_config=HFConfig({}, "fake/config.json"),
            architecture="FakeForCausalLM",
            dtype="float32",
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            hidden_size=8,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_size=8,
            **model,
        ),
        scheduler=SchedulerConfig(policy=policy),
    )


class FakeClient:
    """Returns one token of each request's answer per step, and ends sequences like a real core.

    Attributes:
        requests: All requests so far.
        aborted: All aborted ids.
    """

    platform_summary = "fake, from nowhere"
    cache_summary = KVCacheSummary(num_blocks=16, block_size=16, total_bytes=0, max_model_len=256)

    def __init__(self, config: EngineConfig, answer: Answer, tokens_per_step: int = 1) -> None:
        self.config = config
        self.requests: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.is_shut_down = False
        self.fail_with: BaseException | None = None
        self._answer = answer
        self._tokens_per_step = tokens_per_step
        self._running: dict[str, tuple[EngineCoreRequest, list[int], int]] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        assert request.request_id not in self._running
        assert request.sampling_params.n == 1
        self.requests.append(request)
        self._running[request.request_id] = (request, list(self._answer(request)), 0)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            self._running.pop(request_id, None)

    def has_requests(self) -> bool:
        return bool(self._running)

    def step(self) -> EngineCoreOutputs:
        if self.fail_with is not None:
            raise self.fail_with
        return EngineCoreOutputs(outputs=[self._advance(request_id) for request_id in list(self._running)])

    def interrupt_step(self) -> None:
        pass

    def call(self, command: object) -> bool:
        assert command == ResetPrefixCache()
        return not self._running

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _advance(self, request_id: str) -> EngineCoreOutput:
        request, answer, done = self._running[request_id]
        params = request.sampling_params
        new: list[int] = []
        reason, stop_reason = None, None
        while len(new) < self._tokens_per_step and reason is None:
            token = answer[done + len(new)]
            new.append(token)
            count = done + len(new)
            if token in (params.stop_token_ids or ()) and count > params.min_tokens:
                reason, stop_reason = FinishReason.STOP, token
            elif token in request.eos_token_ids and not params.ignore_eos and count > params.min_tokens:
                reason = FinishReason.STOP
            elif count >= (params.max_tokens or 10**9) or count >= len(answer):
                reason = FinishReason.LENGTH
        self._running[request_id] = (request, answer, done + len(new))
        if reason is not None:
            del self._running[request_id]
        return EngineCoreOutput(
            request_id,
            new,
            reason,
            stop_reason,
            logprobs=[position(t) for t in new] if params.logprobs is not None else None,
            prompt_logprobs=[position(t) for t in request.prompt_token_ids[1:]]
            if params.prompt_logprobs is not None and done == 0
            else None,
            num_cached_tokens=3,
            scheduled_time=request.arrival_time + 0.5,
        )


def position(token_id: int) -> PositionLogprobs:
    """Log-probabilities in which the token at the position has rank two of two."""
    return PositionLogprobs([token_id, token_id + 1, token_id], [-2.0, -1.0, -2.0], 2)
