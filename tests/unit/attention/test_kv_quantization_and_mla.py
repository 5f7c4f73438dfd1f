"""Reference attention with an 8-bit cache, with a different value head size, and with values inside the keys (MLA)."""

from __future__ import annotations

import pytest
import torch

from mvllm.attention import kv_quantization
from mvllm.attention.reference import ReferenceAttention
from mvllm.config.engine_args import EngineArgs
from tests.unit.attention.specs import make_spec

SHAPES = {
    "alike": ((4, 2), 16, {}),
    "values smaller": ((4, 2), 24, {"value_head_size": 16}),
    "values larger": ((2, 1), 16, {"value_head_size": 40}),
    "values in keys": ((8, 1), 72, {"value_head_size": 64, "values_in_keys": True}),
    "values are the keys": ((4, 2), 16, {"values_in_keys": True}),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_bytes_per_token_equals_the_cache_size(shape, kv_dtype) -> None:
    heads, size, fields = shape
    backend = ReferenceAttention(make_spec(*heads, size, kv_dtype=kv_dtype, **fields))
    kv = backend.allocate(3, 16, torch.device("cpu"))
    assert sum(part.nbytes for part in kv) == backend.kv_layout().bytes_per_token * 3 * 16


def test_values_in_keys_are_not_stored_twice() -> None:
    spec = make_spec(16, 1, 576, "bfloat16", value_head_size=512, values_in_keys=True)
    assert ReferenceAttention(spec).kv_layout().bytes_per_token == 576 * 2


@pytest.mark.parametrize(("kv_dtype", "step"), [("int8", 1 / 254), ("float8_e4m3fn", 1 / 16)])
def test_codes_are_within_half_a_step_of_the_numbers(kv_dtype, step) -> None:
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 50).view(-1, 1, 1)
    x[7] = 0
    codes, scales = kv_quantization.encode(x, kv_dtype)
    assert codes.shape == x.shape and codes.itemsize == 1 and scales.shape == x.shape[:2]
    largest = x.abs().amax(-1, keepdim=True)
    allowed = largest * step if kv_dtype == "int8" else torch.maximum(x.abs() * step, largest / 2**18)
    assert ((kv_quantization.decode(codes, scales, kv_dtype) - x).abs() <= allowed * 1.0001).all()


@pytest.mark.parametrize("kv_dtype", kv_quantization.LARGEST)
def test_a_nan_makes_its_whole_vector_nan_and_no_other(kv_dtype) -> None:
    x = torch.ones(2, 2, 8)
    x[0, 1, 3] = torch.nan
    back = kv_quantization.decode(*kv_quantization.encode(x, kv_dtype), kv_dtype)
    assert back[0, 1].isnan().all() and not back[0, 0].isnan().any() and not back[1].isnan().any()


def test_contradictory_specs_are_refused_with_the_reason() -> None:
    (reason,) = ReferenceAttention.validate(make_spec(4, 1, 64, value_head_size=80, values_in_keys=True))
    assert "80" in reason and "64" in reason
    (reason,) = ReferenceAttention.validate(make_spec(4, 1, 64, value_head_size=0))
    assert "0 elements" in reason


@pytest.mark.parametrize(
    ("asked", "stored"), [("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("int8", "int8")]
)
def test_fp8_is_an_alias(asked, stored) -> None:
    assert EngineArgs(model="demo", kv_cache_dtype=asked).create_engine_config().cache.dtype == stored
