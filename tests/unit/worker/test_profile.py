"""What is measured before the KV cache is sized takes as much memory as a step will."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mvllm.config.engine_config import replace_field
from mvllm.ops.argmax import argmax
from mvllm.sampling import sampler
from mvllm.sampling.filters import Filters
from mvllm.worker.model_runner import ModelRunner
from tests.unit.engine.builders import make_config
from tests.unit.worker.fake_platform import FakePlatform


@pytest.mark.parametrize("tokens_on_device", [False, True])
def test_sampling_is_measured_as_it_is_done_in_steps(tokens_on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = FakePlatform()
    platform.capabilities = replace(platform.capabilities, async_copies=tokens_on_device)
    runner = ModelRunner.__new__(ModelRunner)
    runner._config = replace_field(make_config(), "scheduler.async_scheduling", tokens_on_device)
    runner._platform, runner._argmax, runner._sampler = platform, argmax, sampler.Sampler(argmax=argmax)
    at_once: list[int] = []

    def noted(logits: torch.Tensor, peaks: torch.Tensor, filters: Filters) -> torch.Tensor:
        at_once.append(len(logits))
        return torch.ones_like(logits)

    monkeypatch.setattr(sampler, "filtered_weights", noted)
    runner._profile_sampling(torch.zeros(5, sampler._ELEMENTS_AT_ONCE // 2))
    assert at_once == ([5] if tokens_on_device else [2, 2, 1])
