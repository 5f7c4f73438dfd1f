"""`add_lora` equals its definition, token by token."""

from __future__ import annotations

import torch

from mvllm.ops.lora import add_lora
from mvllm.testing.op_cases import op_calls


def test_each_token_gets_the_delta_of_its_own_adapter() -> None:
    for trial in op_calls("add_lora", "float64"):
        y, x, down, up, tokens, segments, bands = trial.make()
        expected = y.clone()
        places = torch.arange(len(x)) if tokens is None else tokens
        for slot, begin, end in segments:
            for token in places[begin:end].tolist():
                for start, stop, block in bands:
                    expected[token, start:stop] += up[slot, start:stop] @ (down[slot, block] @ x[token])
        assert torch.allclose(add_lora(y, x, down, up, tokens, segments, bands), expected)
