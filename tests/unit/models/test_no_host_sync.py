"""A forward pass never reads a value from the device, which would stall the host and break captured graphs.

tests/engine/test_tokens_on_device.py watches a whole step of the runner with the same guards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mvllm.layers.context import ForwardStep
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from tests.helpers.host_sync import ForbidHostReads, ForbidSynchronizingOps
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.paged_driver import HOST, PagedDriver, load_model, make_context, make_layout


def test_the_guard_detects_synchronizing_operations() -> None:
    x = torch.randn(3)
    for question in (lambda: x[0].item(), lambda: x[x > 0], lambda: bool(x.sum() > 0), lambda: x.nonzero()):
        with pytest.raises(AssertionError, match="makes the host wait"), ForbidSynchronizingOps():
            question()


def test_the_other_guard_detects_reads_except_of_host_tensors() -> None:
    host, device = torch.arange(3), torch.arange(3)
    reads: list[Callable[[torch.Tensor], object]] = [
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.cpu,
        lambda x: np.asarray(x),
        lambda x: int(x[0]),
        lambda x: x.sum().item(),
    ]
    with ForbidHostReads(lambda tensor: tensor.untyped_storage()._cdata == host.untyped_storage()._cdata):
        for read in reads:
            with pytest.raises(AssertionError, match="reads a tensor of the device"):
                read(device)
        for read in reads[:5]:
            read(host)
        assert (device + 1).shape == (3,)


@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa",
        "llama-rope-dynamic",
        "llama-rope-longrope",
        "qwen2-window",
        "qwen3",
        "opt-projected",
        "gpt2",
        "gptoss",
        "deepseek3-yarn",
    ],
)
def test_models_do_not_synchronize(name: str, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(name, tmp_path, tokenizer=False))
    layout = make_layout([3, 1], [3, 6], [[0], [1, 2]], 4)
    for layer in model.attention_layers():
        layer.kv_cache = layer.backend.allocate(4, 4, HOST)
    metadata = {layer.spec: layer.backend.build_metadata(layout) for layer in model.attention_layers()}
    ids, positions = torch.tensor([5, 6, 7, 8]).int(), torch.tensor([0, 1, 2, 5]).int()
    prompt_lens = torch.tensor([3, 3, 3, 60]).int()
    with torch.inference_mode(), ForbidSynchronizingOps():
        model.compute_logits(model(ids, positions, ForwardStep(metadata, prompt_lens)))


@pytest.mark.parametrize("name", ["qwen3next", "lfm2", "kimilinear"])
def test_models_with_states_do_not_synchronize_while_they_decode(name: str, tmp_path: Path) -> None:
    """Other steps of the reference operations read the lengths of the requests on the host."""
    model = load_model(make_checkpoint(name, tmp_path, tokenizer=False))
    driver = PagedDriver(model)
    sequences = [driver.add(4), driver.add(3)]
    driver.step([(sequences[0], [5, 6, 7, 8]), (sequences[1], [5, 6, 7])])
    with ForbidSynchronizingOps():
        driver.step([(sequence, [9]) for sequence in sequences])


def test_mixture_of_experts_does_not_synchronize() -> None:
    ctx = make_context()
    experts = FusedMoE(ctx, "experts", 8, 12, num_experts=5, top_k=2)
    layer = SparseMoeBlock(ctx, "gate", experts, Routing(2))
    with torch.inference_mode(), ForbidSynchronizingOps():
        layer(torch.randn(7, 8))
