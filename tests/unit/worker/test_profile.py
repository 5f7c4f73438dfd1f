"""Steps that are run before there are requests, to measure and to compile, are as real ones will be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mvllm.config.engine_config import replace_field
from mvllm.platform.shapes import ShapePolicy
from mvllm.platform.worker_protocol import KVCacheNeeds
from mvllm.sampling import sampler
from mvllm.sampling.filters import Filters
from mvllm.worker.kv_cache_layers import KVCacheLayers
from mvllm.worker.model_runner import ModelRunner
from mvllm.worker.step_inputs import StepInputs
from tests.unit.engine.builders import make_config
from tests.unit.worker.builders import BLOCK_SIZE, HostRuntime, make_rows
from tests.unit.worker.fake_platform import FakePlatform


@pytest.mark.parametrize("tokens_on_device", [False, True])
def test_sampling_is_measured_as_it_is_done_in_steps(tokens_on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = FakePlatform()
    platform.capabilities = replace(platform.capabilities, async_copies=tokens_on_device)
    runner = ModelRunner.__new__(ModelRunner)
    runner._config = replace_field(make_config(), "scheduler.async_scheduling", tokens_on_device)
    runner._platform, runner._make_sampler, runner._runtime = platform, sampler.Sampler, HostRuntime()
    at_once: list[int] = []

    def noted(logits: torch.Tensor, peaks: torch.Tensor, filters: Filters) -> torch.Tensor:
        at_once.append(len(logits))
        return torch.ones_like(logits)

    monkeypatch.setattr(sampler, "filtered_weights", noted)
    vocab_size = sampler._ELEMENTS_AT_ONCE // 2
    runner._config = replace_field(runner._config, "model.vocab_size", vocab_size)
    runner._profile_sampling(torch.zeros(5, vocab_size))
    assert at_once == ([5] if tokens_on_device else [2, 2, 1])


@pytest.mark.parametrize("reads_them", [False, True])
def test_a_model_that_reads_the_prompts_lengths_gets_them(reads_them: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model would else meet an argument of another kind in its first real step."""
    given: list[StepInputs] = []
    runner = ModelRunner.__new__(ModelRunner)
    runner._config, runner._platform, runner._runtime = make_config(), FakePlatform(), HostRuntime()
    runner._pipeline = SimpleNamespace(is_last=False, zero_hidden_states=lambda num_tokens: None)
    runner._attention = KVCacheLayers(runner._config, runner._platform, runner._runtime)
    runner._block_size, runner.rows = BLOCK_SIZE, make_rows()
    model = SimpleNamespace(uses_prompt_lens=reads_them)
    runner._models = SimpleNamespace(model=model, supports_lora=False, draft=None)
    runner._sampled_token_buffer = None
    monkeypatch.setattr(runner, "kv_cache_needs", lambda: KVCacheNeeds(8, (BLOCK_SIZE,)))
    monkeypatch.setattr(runner, "_forward", lambda inputs, intermediate, adapters=None: given.append(inputs))
    monkeypatch.setattr(FakePlatform, "shapes", lambda self: ShapePolicy(), raising=False)
    runner.profile()
    runner._run_all_shapes(ShapePolicy(tokens=(8, 2048)))
    assert len(given) >= 2
    for inputs in given:
        if reads_them:
            assert inputs.prompt_lens is not None and inputs.prompt_lens.dtype == torch.int32
            assert inputs.prompt_lens.shape == inputs.token_ids.shape
        else:
            assert inputs.prompt_lens is None
