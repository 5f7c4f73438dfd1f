"""A forward pass never asks the device for a value: such a question stalls the host and breaks recorded steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mvllm.layers.context import ForwardStep
from mvllm.layers.moe import MoE
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.paged_driver import HOST, load_model, make_context, make_layout

_ASK_THE_DEVICE = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero")


class NoQuestions(TorchDispatchMode):
    """Fails on operations whose result, or its shape, the host has to read from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        assert name not in _ASK_THE_DEVICE and not by_mask, f"{func} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


def test_the_guard_notices_questions() -> None:
    x = torch.randn(3)
    for question in (lambda: x[0].item(), lambda: x[x > 0], lambda: bool(x.sum() > 0), lambda: x.nonzero()):
        with pytest.raises(AssertionError, match="makes the host wait"), NoQuestions():
            question()


@pytest.mark.parametrize(
    "name", ["llama-gqa", "llama-rope-dynamic", "llama-rope-longrope", "qwen2-window", "qwen3", "opt-projected", "gpt2"]
)
def test_models_ask_nothing(name: str, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(name, tmp_path, tokenizer=False))
    layout = make_layout([3, 1], [3, 6], [[0], [1, 2]], 4)
    for layer in model.attention_layers():
        layer.kv_cache = layer.backend.allocate(4, 4, HOST)
    metadata = {layer.spec: layer.backend.build_metadata(layout) for layer in model.attention_layers()}
    ids, positions = torch.tensor([5, 6, 7, 8]).int(), torch.tensor([0, 1, 2, 5]).int()
    prompt_lens = torch.tensor([3, 3, 3, 60]).int()
    with torch.inference_mode(), NoQuestions():
        model.compute_logits(model(ids, positions, ForwardStep(metadata, prompt_lens)))


def test_mixture_of_experts_asks_nothing() -> None:
    layer = MoE(make_context(), "gate", "experts", 8, 12, num_experts=5, top_k=2)
    with torch.inference_mode(), NoQuestions():
        layer(torch.randn(7, 8))
