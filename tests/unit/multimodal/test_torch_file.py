"""Files of torch.save are read without running what is in them."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mvllm.multimodal.torch_file import read_tensor


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


VALUES = torch.arange(24, dtype=torch.float32).reshape(6, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_every_float(dtype: torch.dtype) -> None:
    tensor = (VALUES / 7).to(dtype)
    assert np.array_equal(read_tensor(saved(tensor)), tensor.double().numpy())


@pytest.mark.parametrize(
    "tensor",
    [VALUES[2:5], VALUES[None], VALUES[1:1], VALUES[0], torch.zeros(3, 70_000)[2:], VALUES.clone().requires_grad_()],
    ids=["part", "three", "empty", "row", "large-numbers", "requires-grad"],
)
def test_contiguous_parts_of_a_storage(tensor: torch.Tensor) -> None:
    found = read_tensor(saved(tensor))
    assert found.shape == tuple(tensor.shape) and np.array_equal(found, tensor.detach().numpy())


class Program:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def with_entry(name: str, content: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    source, file = zipfile.ZipFile(io.BytesIO(saved(VALUES))), io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as target:
        for each in source.namelist():
            target.writestr(each, content if each.endswith(name) else source.read(each))
    return file.getvalue()


def test_nothing_else_is_read(tmp_path: Path) -> None:
    program = zipfile.ZipFile(io.BytesIO(saved(VALUES))).read("archive/data.pkl")
    for data in (
        saved(Program(tmp_path / "made")),
        saved({"x": VALUES}),
        saved([VALUES, VALUES]),
        saved(VALUES.int()),
        saved(VALUES.t()),
        saved(VALUES[:, :2]),
        saved(VALUES[:1].expand(6, 4)),
        saved(VALUES.to_sparse()),
        saved(torch.zeros(2, 2, 2, 2)),
        saved(VALUES, _use_new_zipfile_serialization=False),
        with_entry("data/0", b"\0" * 95),
        with_entry("byteorder", b"big"),
        with_entry("data.pkl", program.replace(b"_rebuild_tensor_v2", b"_rebuild_qtensor_x")),
        with_entry("data.pkl", program[:-1]),
        with_entry("data.pkl", b""),
        with_entry("data/0", b"\0" * 96, zipfile.ZIP_DEFLATED),
        saved(VALUES)[:-30],
        b"PK\x03\x04",
    ):
        with pytest.raises(ValueError, match=r"\w"):
            read_tensor(data)
    assert not (tmp_path / "made").exists()
