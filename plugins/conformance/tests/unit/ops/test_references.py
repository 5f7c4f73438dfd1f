"""The reference of each quantized operation equals its definition in float64, and its formats are those of gguf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from mvllm.ops.all_schemas import SCHEMAS
from mvllm.ops.block_formats import BLOCK_FORMATS, dequantize_rows
from mvllm_conformance.block_quantized_cases import random_blocks
from mvllm_conformance.op_cases import exact, op_calls, tolerance

OPERATIONS = (
    "block_quantized_linear",
    "block_quantized_linear_silu_and_mul",
    "float8_linear",
    "quantized_linear",
    "quantized_moe",
)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_equals_the_definition_for_every_kind_of_weight(op: str, dtype: str) -> None:
    for trial in op_calls(op, dtype):
        arguments = trial.make()
        found, wanted = SCHEMAS[op].reference(*arguments), exact(trial)
        off = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert found.dtype == arguments[0].dtype and off < tolerance(dtype, trial), f"{trial}: off by {off:.2g}"


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_dequantized_values_equal_those_of_gguf_bit_for_bit(format: str) -> None:
    in_file = GGMLQuantizationType[format.upper()]
    typical = random_blocks(format, 40, 768, seed=3)
    any_bytes = torch.randint(0, 256, (400, typical.shape[1]), dtype=torch.uint8, generator=torch.Generator())
    for data in (typical, any_bytes):
        with np.errstate(all="ignore"):
            wanted = torch.from_numpy(dequantize(data.numpy(), in_file).astype(np.float32))
        found = dequantize_rows(data, format)
        assert found.dtype == torch.float32 and found.shape == (len(data), 768)
        same = found.view(torch.int32) == wanted.view(torch.int32)
        assert (same | (found.isnan() & wanted.isnan())).all()
