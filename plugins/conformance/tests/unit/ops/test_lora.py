"""`add_lora` equals its definition, token by token, and `add_lora_by_slot` equals `add_lora`."""

from __future__ import annotations

import torch

from mvllm.ops.lora import add_lora, add_lora_by_slot
from mvllm_conformance.op_cases import op_calls


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


def test_adapters_on_the_device_give_the_same() -> None:
    by_segment, by_slot = op_calls("add_lora", "float64"), op_calls("add_lora_by_slot", "float64")
    for one, other in zip(by_segment, by_slot, strict=True):
        assert torch.allclose(add_lora_by_slot(*other.make()), add_lora(*one.make()))


def test_tokens_without_an_adapter_are_unchanged() -> None:
    y, x, down, up, slots, bands = list(op_calls("add_lora_by_slot", "float32"))[-1].make()
    before, none = y.clone(), slots < 0
    found = add_lora_by_slot(y, x, down, up, slots, bands)
    assert none.any() and torch.equal(found[none], before[none]) and not torch.equal(found, before)
