"""The profile run and the warm-up use the inputs and the sampling of real steps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mvllm.config.engine_config import replace_field
from mvllm.platform.shapes import ShapePolicy
from mvllm.sampling import sampler
from mvllm.sampling.filters import Filters
from mvllm.worker.kv_cache_layers import KVCacheLayers
from mvllm.worker.model_forward import ModelForward
from mvllm.worker.step_inputs import StepInputs
from mvllm.worker.warm_up import profile_sampling, profile_step, warm_up
from tests.unit.engine.builders import make_config
from tests.unit.worker.builders import BLOCK_SIZE, HostRuntime, make_rows
from tests.unit.worker.fake_platform import FakePlatform


@pytest.mark.parametrize("tokens_on_device", [False, True])
def test_sampling_is_measured_as_it_is_done_in_steps(tokens_on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = FakePlatform()
    platform.capabilities = replace(platform.capabilities, async_copies=tokens_on_device)
    config = replace_field(make_config(), "scheduler.async_scheduling", tokens_on_device)
    vocab_size = sampler._ELEMENTS_AT_ONCE // 2
    config = replace_field(config, "model.vocab_size", vocab_size)
    batch_sizes: list[int] = []

    def record(logits: torch.Tensor, max_logits: torch.Tensor, filters: Filters) -> torch.Tensor:
        batch_sizes.append(len(logits))
        return torch.ones_like(logits)

    monkeypatch.setattr(sampler, "filtered_weights", record)
    forward = SimpleNamespace(config=config, platform=platform, runtime=HostRuntime())
    profile_sampling(forward, sampler.Sampler, torch.zeros(5, vocab_size))
    assert batch_sizes == ([5] if tokens_on_device else [2, 2, 1])


@pytest.mark.parametrize("reads_them", [False, True])
def test_a_model_that_reads_the_prompts_lengths_gets_them(reads_them: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a compiled model would get an argument of another type in its first real step."""
    given: list[StepInputs] = []
    config, platform, runtime = make_config(), FakePlatform(), HostRuntime()
    pipeline = SimpleNamespace(is_last=False, zero_hidden_states=lambda num_tokens: None)
    loader = SimpleNamespace(model=SimpleNamespace(uses_prompt_lens=reads_them), supports_lora=False, draft=None)
    layers = KVCacheLayers(config, platform, runtime)
    forward = ModelForward(config, platform, runtime, loader, layers, pipeline)
    monkeypatch.setattr(forward, "run", lambda inputs, *others: given.append(inputs))
    forward.is_static = True
    for shapes in (ShapePolicy(), ShapePolicy(tokens=(8, 2048))):
        monkeypatch.setattr(forward, "shapes", lambda shapes=shapes: shapes)
        profile_step(forward, sampler.Sampler, divisor=1, block_size=BLOCK_SIZE, num_draft_tokens=0)
        warm_up(forward, sampler.Sampler(), None, block_size=BLOCK_SIZE, max_pages=make_rows().max_pages)
    assert len(given) >= 4
    for inputs in given:
        if reads_them:
            assert inputs.prompt_lens is not None and inputs.prompt_lens.dtype == torch.int32
            assert inputs.prompt_lens.shape == inputs.token_ids.shape
        else:
            assert inputs.prompt_lens is None
