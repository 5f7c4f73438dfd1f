"""The reference operations compared with float64 formulas and transformers' functions."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mvllm.errors import ModelError
from mvllm.layers.activation import ACTIVATIONS, activation, gated_activation
from mvllm.ops.all_schemas import SCHEMAS
from mvllm.ops.registry import OpTable
from tests.helpers.paged_driver import make_context


def reference(name: str):
    return SCHEMAS[name].reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers_in_every_bit(dtype: torch.dtype) -> None:
    module = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(5, 3, 48).to(dtype)
    torch.testing.assert_close(reference("rms_norm")(x, module.weight, 1e-5), module(x), atol=0, rtol=0)


def test_fused_add_rms_norm_is_the_norm_of_the_sum_and_the_sum() -> None:
    x, residual, weight = torch.randn(4, 16), torch.randn(4, 16), torch.randn(16)
    normed, total = reference("fused_add_rms_norm")(x.clone(), residual.clone(), weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, reference("rms_norm")(x + residual, weight, 1e-6))


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_output_has_the_mean_and_deviation_of_its_weights(affine: bool) -> None:
    x = torch.randn(6, 40) * 3 + 1
    weight, bias = (torch.randn(40), torch.randn(40)) if affine else (None, None)
    wide = x.double()
    expected = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    if affine:
        expected = expected * weight.double() + bias.double()
    torch.testing.assert_close(reference("layer_norm")(x, weight, bias, 1e-5).double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_embedding_takes_both_kinds_of_integers(ids_dtype: torch.dtype) -> None:
    table = torch.randn(7, 4)
    ids = torch.tensor([6, 0, 6, 3], dtype=ids_dtype)
    torch.testing.assert_close(reference("embedding")(ids, table), table[[6, 0, 6, 3]])


def test_embedding_gives_zeros_for_rows_of_other_ranks() -> None:
    table = torch.full((2, 3), float("nan"))
    found = reference("embedding")(torch.tensor([3, 4, 6]), table, 4)
    assert found.isnan().any(dim=1).tolist() == [False, True, False]
    assert not found[0].any() and not found[2].any()


def test_rotary_embedding_rotates_each_pair_by_its_angle_and_keeps_the_rest() -> None:
    angles = torch.rand(9, 3, dtype=torch.float64) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    qkv = torch.randn(4, 3, 10)  # two query heads and one key head, split from one product
    index = torch.tensor([8, 0, 3, 3], dtype=torch.int32)
    query, key = reference("rotary_embedding")(index, qkv[:, :2], qkv[:, 2:], cos_sin)
    pairs = torch.complex(qkv[..., :3].double(), qkv[..., 3:6].double())
    turned = pairs * torch.polar(torch.ones(4, 1, 3, dtype=torch.float64), angles[index.long()].unsqueeze(1))
    expected = torch.cat((turned.real, turned.imag, qkv[..., 6:].double()), dim=-1)
    torch.testing.assert_close(torch.cat((query, key), dim=1).double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_transformers(name: str) -> None:
    x = torch.linspace(-8, 8, 401)
    ours = activation(make_context(), name, 401)(x)
    torch.testing.assert_close(ours, ACT2FN[name](x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu"])
def test_gated_activations_multiply_the_halves(name: str) -> None:
    x = torch.randn(5, 12)
    gate, up = x.chunk(2, dim=-1)
    ours = gated_activation(make_context(), name, 6)(x)
    torch.testing.assert_close(ours, ACT2FN[name](gate) * up, atol=1e-6, rtol=1e-6)


def test_an_unknown_activation_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ModelError, match=r"'wiggle' of this model is not supported.*gelu_new"):
        activation(make_context(), "wiggle", 4)


def test_moe_sums_the_chosen_experts_by_their_weights() -> None:
    tokens, hidden, inner, experts, top_k = 6, 8, 5, 4, 2
    x = torch.randn(tokens, hidden)
    gate_up, down = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for t in range(tokens):
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            expected[t] += weight * (down[expert].double() @ (torch.nn.functional.silu(gate) * up))
    op = OpTable.resolve().get(
        "moe", torch.float32, num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inner
    )
    torch.testing.assert_close(op(x, gate_up, down, ids, weights).double(), expected, atol=1e-5, rtol=1e-5)


def test_the_decay_of_a_head_is_its_factor_times_the_softplus_of_its_elements() -> None:
    x, factors, bias = torch.randn(5, 6), -torch.rand(3), torch.randn(6)
    expected = torch.log1p((x + bias).double().exp()) * factors.repeat_interleave(2)
    torch.testing.assert_close(reference("log_decay")(x, factors, bias).double(), expected, atol=1e-6, rtol=1e-6)
    assert reference("log_decay")(x.bfloat16(), factors, bias).dtype == torch.float32


def test_each_head_is_multiplied_by_its_own_matrix() -> None:
    x, weight = torch.randn(4, 3, 5), torch.randn(3, 5, 7)
    expected = torch.stack([x[:, head] @ weight[head] for head in range(3)], dim=1)
    torch.testing.assert_close(reference("head_product")(x, weight), expected)
