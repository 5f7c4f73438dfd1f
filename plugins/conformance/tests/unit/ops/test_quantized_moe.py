"""The reference of `quantized_moe` against the references of single matrices."""

from __future__ import annotations

import torch

from mvllm.ops.block_quantized_linear import BlockQuantizedWeight, block_quantized_linear
from mvllm.ops.float8_linear import Float8Weight, float8_linear
from mvllm.ops.moe import clamped_gate
from mvllm.ops.quantized_linear import QuantizedWeight, quantized_linear
from mvllm.ops.quantized_moe import quantized_moe
from mvllm_conformance.op_cases import op_calls

LINEAR = {
    QuantizedWeight: quantized_linear,
    Float8Weight: float8_linear,
    BlockQuantizedWeight: block_quantized_linear,
}


def test_each_expert_equals_the_linear_operations_of_its_matrices() -> None:
    trials = [trial for trial in op_calls("quantized_moe", "bfloat16") if len(trial.make()[0]) <= 3]
    assert {trial.facts["linear"] for trial in trials} == {linear.__name__ for linear in LINEAR.values()}
    for trial in trials:
        x, gate_up, gate_up_bias, down, down_bias, ids, shares, alpha, limit = trial.make()
        total = torch.zeros(x.shape)
        for token, experts in enumerate(ids.tolist()):
            for k, e in enumerate(experts):
                linear = LINEAR[type(gate_up[e])]
                both = linear(x[token, None], gate_up[e], None if gate_up_bias is None else gate_up_bias[e])
                gate, up = both.chunk(2, dim=1)
                inner = clamped_gate(gate, up, alpha, limit) if alpha else torch.nn.functional.silu(gate) * up
                out = linear(inner, down[e], None if down_bias is None else down_bias[e])[0]
                total[token] += out.float() * shares[token, k]
        found = quantized_moe(x, gate_up, gate_up_bias, down, down_bias, ids, shares, alpha, limit)
        torch.testing.assert_close(found.float(), total, atol=0.02 * float(total.abs().max()), rtol=0, msg=str(trial))
