"""A closed engine frees its weights and its cache at once, because the next engine in the process needs the memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mvllm import SamplingParams
from mvllm.worker.model_runner import ModelRunner
from mvllm.worker.worker import Worker
from tests.engine.conftest import MakeLLM


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Disables garbage collection: device memory does not trigger it, so it may never run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True, "async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"quantization": "int8"},
    ],
    ids=["compiled", "eager", "speculative", "quantized"],
)
def test_weights_and_cache_are_gone(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, settings: dict) -> None:
    tensors: list[weakref.ref[torch.Tensor]] = []
    allocate = ModelRunner.allocate_kv_cache

    def allocated(runner: ModelRunner, *args: int) -> None:
        allocate(runner, *args)
        found = [*runner.loader.model.parameters(), *runner.loader.model.buffers()]
        found += [part for layer in runner._layers._layers if layer.kv_cache is not None for part in layer.kv_cache]
        tensors.extend(weakref.ref(tensor) for tensor in found)

    monkeypatch.setattr(ModelRunner, "allocate_kv_cache", allocated)
    llm = make_llm(distributed_executor_backend="uni", **settings)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert tensors and all(tensor() is not None for tensor in tensors)
    llm.llm_engine.shutdown()
    assert not [tuple(tensor.shape) for ref in tensors if (tensor := ref()) is not None]


def test_captured_steps_go_before_the_groups_whose_collectives_they_hold() -> None:
    """A collective library waits at shutdown for the graphs that have captured its collectives."""
    order: list[str] = []
    nothing: Any = None
    worker = Worker(nothing, nothing, nothing)
    worker._runner = cast("Any", SimpleNamespace(close=lambda: order.append("model")))
    worker._groups = cast("Any", SimpleNamespace(close=lambda: order.append("groups")))
    worker._runtime = cast("Any", SimpleNamespace(shutdown=lambda: order.append("device")))
    worker.shutdown()
    worker.shutdown()
    assert order == ["model", "groups", "device"]
