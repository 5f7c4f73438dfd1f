"""The block formats of core's operations are those of GGUF files."""

from __future__ import annotations

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from mvllm.ops.block_formats import BLOCK_FORMATS


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_sizes_are_those_of_the_file_types(name: str) -> None:
    known = BLOCK_FORMATS[name]
    assert GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]] == (known.block_values, known.block_bytes)
    assert known.row_bytes(512) == 512 // known.block_values * known.block_bytes
