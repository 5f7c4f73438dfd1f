"""Headers of safetensors files: valid ones are read, and invalid ones are refused before any data is read."""

from __future__ import annotations

import json
import os
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mvllm.errors import ModelError
from mvllm.models.safetensors_file import SafetensorsReader, read_header
from tests.unit.weights.files import entry, write_raw


def test_a_header_has_names_dtypes_shapes_and_offsets(tmp_path):
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.tensor(7, dtype=torch.int64),
        "c": torch.zeros(0, 5, dtype=torch.bfloat16),
        "d": torch.ones(3, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = {e.name: e for e in read_header(tmp_path / "x.safetensors")}
    assert {name: (e.dtype, e.shape, e.num_bytes) for name, e in found.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("I64", (), 8),
        "c": ("BF16", (0, 5), 0),
        "d": ("BF16", (3,), 6),
    }
    buffer = bytearray(24)
    with SafetensorsReader(tmp_path / "x.safetensors") as reader:
        reader.read_into(memoryview(buffer), found["a"], 0)
        assert torch.equal(torch.frombuffer(buffer, dtype=torch.float32), torch.arange(6.0))
        reader.read_into(memoryview(buffer)[:8], found["a"], 16)
    assert struct.unpack_from("<2f", buffer) == (4.0, 5.0)


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b"", b"", "no valid safetensors header"),
        (b"{", b"", "no valid safetensors header"),
        (b"[]", b"", "expected a JSON object, found list"),
        (b"\xff\xfe", b"", "no valid safetensors header"),
        (b"[" * 100_000, b"", "no valid safetensors header"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "no valid safetensors header"),
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 3}', b"x", "lists 'a' twice"),
        ({"a": 3}, b"", "should be an object, found 3"),
        ({"a": {}}, b"", "has dtype None"),
        ({"a": entry("F31", [1], 0, 4)}, b"1234", "has dtype 'F31', expected one of F64, F32"),
        ({"a": entry(["F32"], [1], 0, 4)}, b"1234", "has dtype"),
        ({"a": entry("F32", [-1], 0, 4)}, b"1234", r"has shape \[-1\]"),
        ({"a": entry("F32", [1.0], 0, 4)}, b"1234", r"has shape \[1.0\]"),
        ({"a": entry("F32", [True], 0, 4)}, b"1234", r"has shape \[True\]"),
        ({"a": entry("F32", 1, 0, 4)}, b"1234", "has shape 1"),
        ({"a": entry("F32", [1], 4, 0)}, b"1234", r"data_offsets \[4, 0\]"),
        ({"a": entry("F32", [1], -4, 0)}, b"1234", r"data_offsets \[-4, 0\]"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"1234", r"data_offsets \[0\]"),
        ({"a": entry("F32", [2], 0, 4)}, b"1234", r"F32 of shape \[2\] takes 8 bytes.*\[0, 4\] span 4"),
        ({"a": entry("F32", [2**62, 2**62], 0, 4)}, b"1234", "takes .* bytes"),
        ({"a": entry("F32", [2**62] * 16, 0, 4)}, b"1234", "takes .* bytes"),
        ({"a": entry("F32", [1] * 17, 0, 4)}, b"1234", "has shape"),
        ({"a": entry("F32", [2**63], 0, 4)}, b"1234", "has shape"),
        ({"a": entry("U8", [1], 10**4299, 10**4299 + 1)}, b"1234", "has data_offsets"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, b"123456", "'a' and 'b' overlap"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, b"1234", "overlap"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 6, 10)}, b"1234567890", "2 bytes before tensor 'b'"),
        ({"a": entry("F32", [1], 2, 6)}, b"123456", "2 bytes before tensor 'a' belong to no tensor"),
        ({"a": entry("F32", [2], 0, 8)}, b"1234567", r"cut short: its header describes \d+ bytes, the file has \d+"),
        ({"a": entry("F32", [1], 0, 4)}, b"12345", "1 bytes longer"),
    ],
)
def test_an_invalid_header_is_refused_with_the_reason(tmp_path, header, data, said):
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(ModelError, match=said) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001])
def test_an_absurd_header_length_is_refused_without_reading_that_much(tmp_path, length):
    path = write_raw(tmp_path / "bad.safetensors", {}, length=length)
    with pytest.raises(ModelError, match=rf"its header claims {length} bytes"):
        read_header(path)


def test_a_header_of_far_more_tensors_than_a_model_needs_is_refused_before_it_is_parsed(tmp_path):
    many = b'{"a":{},' * 4000  # not JSON: parsing it would raise another error
    path = write_raw(tmp_path / "bad.safetensors", many)
    with pytest.raises(ModelError, match=r"lists about 7999 tensors, and at most 100 are allowed for this model"):
        read_header(path, 100)
    with pytest.raises(ModelError, match="no valid safetensors header"):
        read_header(path, 8000)
    path = write_raw(tmp_path / "long.safetensors", b" " * (2 << 20))
    with pytest.raises(ModelError, match=r"its header claims 2097152 bytes, and at most 1099776 are allowed"):
        read_header(path, 100)


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    write_raw(tmp_path / "good.safetensors", b"{}", length=2)
    assert read_header(tmp_path / "good.safetensors") == []
    write_raw(tmp_path / "bad.safetensors", b"{}", length=3)
    with pytest.raises(ModelError, match="its header alone needs 11 bytes, the file has 10"):
        read_header(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("size", range(8))
def test_a_file_too_short_for_anything(tmp_path, size):
    (tmp_path / "bad.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(ModelError, match=f"has {size} bytes, too few"):
        read_header(tmp_path / "bad.safetensors")


def test_long_names_are_shortened_in_errors(tmp_path):
    path = write_raw(tmp_path / "bad.safetensors", {"x" * 1_000_000: entry("F32", [1], 0, 3)}, b"123")
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert len(str(caught.value)) < 1000


def test_a_missing_or_unreadable_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        read_header(tmp_path)


def test_a_file_cut_short_between_check_and_read_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    [found] = read_header(path)
    with path.open("r+b") as file:
        file.truncate(found.start + 50)
    with SafetensorsReader(path) as reader, pytest.raises(ModelError, match="ended inside tensor 'a'"):
        reader.read_into(memoryview(bytearray(400)), found, 0)


# --- fuzzing

names = st.sampled_from(["a", "b", "__metadata__", "", "\ud800", "model.embed.weight"])
numbers = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**30, 10**4000]))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
entries = st.one_of(
    json_values,
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from(["F32", "BF16", "U8", "I64", "F99"]), json_values),
            "shape": st.one_of(st.lists(st.integers(0, 5), max_size=3), st.lists(numbers, max_size=400), json_values),
            "data_offsets": st.one_of(
                st.lists(st.integers(0, 40), min_size=2, max_size=2),
                st.lists(numbers, min_size=2, max_size=2),
                json_values,
            ),
        }
    ),
)


def outcome(path) -> str:
    try:
        read_header(path)
        return "read"
    except ModelError:
        return "refused"


@given(header=st.dictionaries(names, entries, max_size=3), data=st.binary(max_size=40))
def test_every_header_that_is_accepted_is_accepted_by_the_safetensors_library(tmp_path_factory, header, data):
    path = write_raw(tmp_path_factory.mktemp("fuzz") / "x.safetensors", header, data)
    if outcome(path) == "read":
        try:
            with safe_open(path, framework="np") as file:
                assert sorted(file.keys()) == sorted(e.name for e in read_header(path))
        except SafetensorError as e:
            assert "__metadata__" in header or "UTF" in str(e) or "unicode" in str(e).lower(), e


@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(content)
    outcome(path)


@given(position=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 250))
def test_a_file_with_any_damage_is_read_or_refused(tmp_path_factory, position, value, cut):
    header = json.dumps({"a": entry("F32", [2, 2], 0, 16), "b": entry("U8", [4], 16, 20)}).encode()
    content = bytearray(struct.pack("<Q", len(header)) + header + bytes(20))
    content[position % len(content)] = value
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(content[:cut])
    outcome(path)


def test_a_pipe_instead_of_a_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match="a pipe or a device"):
        read_header(tmp_path / "x.safetensors")


def test_a_large_tensor_is_read_by_two_threads_and_truncation_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    tensor = torch.arange(3_000_001, dtype=torch.int32)
    save_file({"a": torch.zeros(7), "b": tensor}, path)
    found = {e.name: e for e in read_header(path)}["b"]
    for offset in (0, 4, 1_000_000):
        buffer = bytearray(found.num_bytes - offset)
        with SafetensorsReader(path) as reader:
            reader.read_into(memoryview(buffer), found, offset)
        assert torch.equal(torch.frombuffer(buffer, dtype=torch.int32), tensor[offset // 4 :])
    for missing in (1, found.num_bytes // 2 + 5):
        with SafetensorsReader(path) as reader:
            os.truncate(path, found.start + found.num_bytes - missing)
            with pytest.raises(ModelError, match="ended inside tensor 'b'"):
                reader.read_into(memoryview(bytearray(found.num_bytes)), found, 0)
