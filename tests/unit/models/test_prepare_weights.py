"""Layers are prepared while a checkpoint is loaded: once each, as soon as all their tensors are loaded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mvllm.models.registry import resolve_model_class
from mvllm.models.weight_loader import load_weights
from mvllm.platform.op_provider import OpProvider
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.paged_driver import make_context, read_config


class Prepared:
    """A prepared weight of a provider."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = tuple(weight.shape)
        self.total = float(weight.double().abs().sum())


def build(folder: Path, lookup: Callable[..., torch.Tensor] | None = None):
    """A model whose linear weights are prepared, and the prepared weights so far."""
    prepared: list[Prepared] = []

    def prepare(weight: torch.Tensor) -> Prepared:
        prepared.append(Prepared(weight))
        return prepared[-1]

    config = read_config(folder)
    provider = OpProvider("linear", "test", lambda x, weight, bias: x, prepare=prepare, lookup=lookup)
    ctx = make_context(providers=[provider])
    return resolve_model_class(config.architecture)(config, ctx), prepared


def load_collecting(model: nn.Module, folder: Path, load_format: str, on_loaded: Callable[[str], None]) -> None:
    """Loads weights; `on_loaded` collects garbage, without scanning the libraries' objects."""
    gc.freeze()
    try:
        load_weights(model, folder, load_format=load_format, use_tqdm=False, on_loaded=on_loaded)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_each_layer_is_prepared_after_its_last_tensor(tmp_path: Path, load_format: str) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path)
    model, prepared = build(folder)
    matrices = {
        name: weakref.ref(p) for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name
    }
    alive = []

    def on_loaded(name: str) -> None:
        model.tensor_loaded(name)
        gc.collect()
        alive.append(sum(ref() is not None for ref in matrices.values()))

    load_collecting(model, folder, load_format, on_loaded)
    assert len(prepared) == len(matrices) and alive[-1] == 0, "no loaded weight outlives its prepared form"
    assert sorted(alive, reverse=True) == alive and len(set(alive)) == len(matrices) + (alive[0] == len(matrices))
    assert all(p.total > 0 for p in prepared)
    model.after_load()
    assert len(prepared) == len(matrices), "once is enough"


def test_a_tied_lm_head_is_prepared_last(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2-mqa-tied", tmp_path)
    model, prepared = build(folder)
    assert model.ties_head
    load_weights(model, folder, use_tqdm=False, on_loaded=model.tensor_loaded)
    before = len(prepared)
    model.after_load()
    assert [p.shape for p in prepared[before:]] == [tuple(model.embed_tokens.weight.shape)]
    assert isinstance(model.embed_tokens.weight, nn.Parameter) and isinstance(model.lm_head.weight, Prepared)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_a_tied_lm_head_and_its_embedding_share_a_prepared_weight_that_supports_lookup(
    tmp_path: Path, load_format: str
) -> None:
    folder = make_checkpoint("qwen2-mqa-tied", tmp_path)
    asked: list[object] = []

    def lookup(ids: torch.Tensor, weight: Prepared, first: int | None = None) -> torch.Tensor:
        asked.append(weight)
        return torch.zeros(len(ids), weight.shape[1])

    model, prepared = build(folder, lookup)
    table = weakref.ref(model.embed_tokens.weight)
    shape, in_memory = tuple(model.embed_tokens.weight.shape), {}

    def on_loaded(name: str) -> None:
        model.tensor_loaded(name)
        gc.collect()
        in_memory[name] = table() is not None

    load_collecting(model, folder, load_format, on_loaded)
    assert not in_memory["model.embed_tokens.weight"], "the loaded form is gone before anything else is read"
    assert [p.shape for p in prepared].count(shape) == 1
    before = len(prepared)
    model.after_load()
    assert len(prepared) == before
    assert isinstance(model.lm_head.weight, Prepared) and model.embed_tokens.weight is model.lm_head.weight
    assert model.embed_tokens(torch.arange(3)).shape == (3, shape[1]) and asked == [model.lm_head.weight]
    hidden = torch.zeros(2, shape[1])
    assert model.compute_logits(hidden).shape[0] == 2
