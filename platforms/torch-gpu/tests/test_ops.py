"""Op providers of the shared kernels, with core's operation names and parameters."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from mvllm.ops.all_schemas import SCHEMAS
from mvllm.plugin_api import OpCase
from mvllm.testing.op_cases import exact, op_calls, tolerance
from mvllm.testing.state_cases import compared, has_state

# Skips without Triton. The kernels are imported after it.
importlib.import_module("platforms.torch-gpu.tests.interpreted")

from mvllm_torch_gpu.ops import FLOAT8, providers  # noqa: E402

PROVIDERS = {provider.op: provider for provider in providers()}


def test_all_operations_of_a_layer_have_a_provider():
    assert {
        "float8_linear",
        "filtered_draw",
        "rms_norm",
        "fused_add_rms_norm",
        "rotary_embedding",
        "silu_and_mul",
        "argmax",
        "select_experts",
    } <= PROVIDERS.keys()


@pytest.mark.parametrize("op", PROVIDERS)
def test_a_provider_has_the_references_parameters(op):
    assert tuple(inspect.signature(PROVIDERS[op].function).parameters) == SCHEMAS[op].parameters


@pytest.mark.parametrize("op", PROVIDERS)
def test_a_provider_gives_the_results_of_the_reference(op):
    provider, trial = PROVIDERS[op], next(iter(op_calls(op, "float32")))
    assert provider.supports(OpCase(op, "float32", trial.facts)) == []
    arguments = list(trial.make())
    if provider.prepare is not None:
        indices = trial.weight if isinstance(trial.weight, tuple) else (trial.weight,)
        weights = tuple(arguments[index] for index in indices)
        prepared = provider.prepare(weights if len(weights) > 1 else weights[0])
        for index, weight in zip(indices, prepared if len(weights) > 1 else (prepared,), strict=True):
            arguments[index] = weight
    found, wanted = provider.function(*arguments), exact(trial)
    if has_state(op):
        found = tuple(compared(trial, [found], arguments))
    for mine, theirs in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, wanted)), strict=True):
        largest = max(1.0, float(theirs.double().abs().max()))
        assert (mine.double() - theirs.double()).abs().max() <= tolerance("float32") * largest
        assert mine.dtype in (torch.float32, torch.int64)


@pytest.mark.parametrize("op", PROVIDERS)
def test_dtypes_without_a_kernel_are_declined(op):
    facts = {"in_features": 64, "group_size": 64, "bits": 8, "block_columns": 64, "num_experts": 8, "top_k": 2}
    facts |= {"num_groups": 1}
    facts |= {"hidden_size": 64, "intermediate_size": 64, "linear": "quantized_linear"}
    facts |= dict.fromkeys(("gate_up", "down"), (("bits", 8), ("group_size", 64)))
    [reason] = PROVIDERS[op].supports(OpCase(op, "float64", facts))
    assert "float64" in reason and "bfloat16" in reason


def test_weights_that_cannot_be_packed_are_declined():
    facts = {"in_features": 128, "group_size": 24, "bits": 4}
    [reason] = PROVIDERS["quantized_linear"].supports(OpCase("quantized_linear", "bfloat16", facts))
    assert "multiple of 32 columns" in reason


def test_unsupported_blocks_of_8_bit_floats_are_declined():
    facts = {"in_features": 128, "block_columns": 24}
    [reason] = PROVIDERS["float8_linear"].supports(OpCase("float8_linear", "bfloat16", facts))
    assert "power of two" in reason


@pytest.mark.parametrize("name", FLOAT8)
@pytest.mark.parametrize("multiplied", [False, True])
def test_8_bit_float_weights_have_the_devices_format(name, multiplied):
    [provider] = [p for p in providers(name, multiplies_float8=multiplied) if p.op == "float8_linear"]
    trial = next(iter(op_calls("float8_linear", "float32")))
    x, weight, bias = trial.make()
    packed = provider.prepare(weight)
    assert packed.weight.dtype == FLOAT8[name] and packed.native is multiplied
    found, wanted = provider.function(x, packed, bias), exact(trial)
    assert (found.double() - wanted).abs().max() <= tolerance("float32") * wanted.abs().max()
