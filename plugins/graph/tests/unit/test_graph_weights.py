"""Weights that are given to a program module by module are those of a loaded model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import LoadConfig
from mvllm.config.model import ModelConfig
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.layers.context import BuildContext
from mvllm.layers.quantization.registry import quantization_method
from mvllm.models.causal_lm import CausalLM
from mvllm.models.registry import resolve_model_class
from mvllm.models.weight_loader import load_weights
from mvllm.models.weight_update import UnallocatedContext
from mvllm.ops.registry import OpTable
from mvllm_graph import Interpreter
from mvllm_graph.recorded_calls import RecordedAttention, recording_providers
from mvllm_graph.trace import named_arrays
from mvllm_graph.worker.weights import GraphWeightUpdate, ValuesInStructure, weightless_model
from tests.helpers.model_zoo import ZOO, make_checkpoint

FEW = ("llama-gqa", "gpt2", "gemma2", "qwen3moe", "bamba", "qwen3next")
"""Fused projections; biases and tied embeddings; norms plus one; experts; two kinds of sequence states."""


def setting(folder: Path, **settings: object) -> tuple[ModelConfig, BuildContext]:
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="float32", **settings)  # type: ignore[arg-type]
    config = args.create_engine_config().model
    context = BuildContext(
        dtype=torch.float32,
        device=torch.from_numpy(np.empty(0)).device,
        ops=OpTable.resolve(recording_providers(Interpreter().operations())),
        attention=RecordedAttention,
        tp=GroupCoordinator.single("tp"),
        pp=GroupCoordinator.single("pp"),
        kv_dtype="float32",
        quantization=quantization_method(config),
    )
    return config, context


def distinct(model: CausalLM) -> dict[str, torch.Tensor]:
    """The tensors of a model, each by its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor, _ in named_arrays(model):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def loaded(config: ModelConfig, context: BuildContext) -> dict[str, torch.Tensor]:
    model = resolve_model_class(config.architecture, config.model_impl, config.language_architecture)(config, context)
    load_weights(model, config.path, use_tqdm=False, on_loaded=model.tensor_loaded)
    model.after_load()
    return distinct(model)


def given(config: ModelConfig, context: BuildContext) -> tuple[dict[str, torch.Tensor], CausalLM]:
    """The arrays that a program gets, and the model that is traced."""
    model_class = resolve_model_class(config.architecture, config.model_impl, config.language_architecture)
    model, found = weightless_model(model_class, config, context), dict[str, torch.Tensor]()

    def give(name: str, tensor: torch.Tensor) -> None:
        assert name not in found, f"{name} is given twice"
        found[name] = tensor.detach().clone()

    update = GraphWeightUpdate(
        model, lambda: model_class(config, UnallocatedContext.of(context)), distinct(model), give
    )
    update.load_all(config, dataclasses.replace(LoadConfig(), use_tqdm=False))
    return found, model


def check(folder: Path, **settings: object) -> None:
    config, context = setting(folder, **settings)
    expected, (found, model) = loaded(config, context), given(config, context)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(found[name].float().numpy(), tensor.detach().float().numpy(), err_msg=name)
    sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in distinct(model).items() if tensor.numel() > 1}
    assert max(sizes.values()) <= 8, f"the traced model keeps {max(sizes, key=lambda name: sizes[name])}"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.exhaustive) for n in ZOO])
def test_a_program_gets_the_arrays_of_a_loaded_model(tmp_path: Path, name: str) -> None:
    try:
        check(make_checkpoint(name, tmp_path, tokenizer=False))
    except ValuesInStructure as e:
        assert name not in FEW
        assert str(e)  # such a model is loaded before it is traced


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_matrices_are_quantized_a_module_at_a_time(tmp_path: Path, quantization: str) -> None:
    check(make_checkpoint("llama-gqa", tmp_path, tokenizer=False), quantization=quantization)
