"""The largest element of each row of a host array is the one that the operation `argmax` finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mvllm.ops.argmax import argmax
from mvllm.ops.dtypes import dtype_name
from mvllm_graph.arrays import largest_of_rows, to_numpy

INF, NAN = torch.inf, torch.nan
MINUS_NAN = torch.tensor([0xFFC0], dtype=torch.uint16).view(torch.bfloat16)

ROWS = {
    "positive": [1.0, 3.0, 2.0],
    "equal": [1.0, 3.0, 3.0, 3.0],
    "negative": [-3.0, -1.0, -2.0, -1.0],
    "zeros of both signs": [-1.0, -0.0, 0.0, -0.0],
    "infinite": [1.0, INF, INF],
    "masked": [-INF, 2.0, -INF],
    "all masked": [-INF, -INF],
    "tiny": [0.0, 9.2e-41, -9.2e-41],
    "nan": [1.0, NAN, 7.0, NAN],
    "nan and infinite": [INF, NAN],
    "nan among negative": [-1.0, NAN],
}


def check(rows: torch.Tensor) -> None:
    values, indices = argmax(rows)
    found, found_indices = largest_of_rows(to_numpy(rows), dtype_name(rows.dtype))
    assert found.dtype == np.float32 and found_indices.dtype == np.int64
    assert found_indices.tolist() == indices.tolist()
    np.testing.assert_array_equal(found, values.float().numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_special_rows(row: list[float], dtype: torch.dtype) -> None:
    one = torch.tensor([row], dtype=dtype)
    check(one)
    check(torch.cat([torch.full_like(one, 5.0), one, -one]))


def test_a_negative_nan_is_found() -> None:
    for others in ([1.0, 2.0], [-1.0, -2.0]):
        row = torch.cat([torch.tensor(others).bfloat16(), MINUS_NAN])[None]
        check(row)
        check(torch.cat([row.abs(), row]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_random_rows(num_rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn((num_rows, 997), generator=generator)
    check(rows.to(dtype))
    check((rows * 4).round().to(dtype))  # many are equal
    check((rows - 9).to(dtype))
