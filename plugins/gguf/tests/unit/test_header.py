"""Headers of GGUF files: the values read from valid ones, and rejection of invalid ones with little time and memory."""

from __future__ import annotations

import functools
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.gguf.tests.encoded_files import ARRAY, F32, Q4_0, TEXT, U32, array, raw, tensor, text, value, write_gguf

from mvllm.errors import ModelError
from mvllm_gguf import header
from mvllm_gguf.header import gguf_files, read_gguf

METADATA = {
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["a", "▁b", ""],
    "tokenizer.ggml.scores": [0.0, -1.5, 2.0],
    "tokenizer.ggml.token_type": [1, -3, 2**31 - 1],
    "flags": [True, False, True],
}


def write_good(path):
    blocks = np.arange(2 * 36, dtype=np.uint8).reshape(2, 36)  # 2 rows of 64 values
    return write_gguf(path, {"q": (blocks, Q4_0), "n": (np.arange(6, dtype=np.float32).reshape(2, 3), None)}, METADATA)


def test_values_and_tensors_are_those_that_were_written(tmp_path):
    path = write_good(tmp_path / "m.gguf")
    model = read_gguf(path)
    assert model.files == (path,)
    assert {key: model.metadata[key] for key in METADATA} == METADATA
    assert model.metadata["general.architecture"] == "llama"
    assert {n: (t.type.name, t.shape, t.num_bytes) for n, t in model.tensors.items()} == {
        "q": ("Q4_0", (2, 64), 72),
        "n": ("F32", (2, 3), 24),
    }
    content = path.read_bytes()
    for name, data in (("q", bytes(range(72))), ("n", np.arange(6, dtype=np.float32).tobytes())):
        entry = model.tensors[name]
        assert content[entry.start : entry.start + entry.num_bytes] == data and entry.file == path


def test_texts_that_are_no_utf8_stay_distinct(tmp_path):
    tokens = array(TEXT, 2, text(b"\xff") + text(b"\xfe"))
    model = read_gguf(raw(tmp_path / "m.gguf", [value("t", ARRAY, tokens), value(b"k\xff", TEXT, text(b"\xc3"))]))
    assert [token.encode("utf-8", "surrogateescape") for token in model.metadata["t"]] == [b"\xff", b"\xfe"]
    assert model.metadata["k\udcff"] == "\udcc3"


# --------------------------------------------------------------------------------------------------------- split models


def write_split(folder, count=3, **changes):
    for i in range(count):
        keys = {"split.no": i, "split.count": count, "first": i == 0, **changes}
        name = f"m-{i + 1:05d}-of-{count:05d}.gguf"
        write_gguf(folder / name, {f"t{i}": (np.ones(4, np.float32), None)}, keys)
    return folder / f"m-00001-of-{count:05d}.gguf"


def test_a_split_model_is_read_from_any_of_its_files(tmp_path):
    first = write_split(tmp_path)
    model = read_gguf(tmp_path / "m-00002-of-00003.gguf")
    assert model.files[0] == first and len(model.files) == 3 and model.metadata["first"] is True
    assert {name: entry.file.name[:7] for name, entry in model.tensors.items()} == {
        "t0": "m-00001",
        "t1": "m-00002",
        "t2": "m-00003",
    }


def test_missing_and_renamed_parts_are_named(tmp_path):
    first = write_split(tmp_path)
    (tmp_path / "m-00003-of-00003.gguf").rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"lacks m-00003-of-00003\.gguf, parts of the model"):
        read_gguf(first)
    with pytest.raises(ModelError, match=r"other\.gguf is file 1 of 1 according to its name.*split\.count=3"):
        read_gguf(tmp_path / "other.gguf")
    (tmp_path / "other.gguf").rename(tmp_path / "m-00003-of-00003.gguf")
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf is file 2 of 3 .*split\.no=0"):
        read_gguf(first)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    first = write_split(tmp_path, 2)
    write_gguf(
        tmp_path / "m-00002-of-00002.gguf", {"t0": (np.ones(4, np.float32), None)}, {"split.no": 1, "split.count": 2}
    )
    with pytest.raises(ModelError, match=r"Tensor 't0' is in .*00001-of.* and in .*00002-of"):
        read_gguf(first)


@pytest.mark.parametrize("name", ["m-00000-of-00000.gguf", "m-00004-of-00003.gguf", "m-00001-of-99999.gguf"])
def test_impossible_part_numbers_are_refused(name, tmp_path):
    with pytest.raises(ModelError, match="according to its name; allowed are 1 to 1000 files"):
        gguf_files(tmp_path / name)


def test_the_limits_apply_to_the_sum_of_all_files(tmp_path, monkeypatch):
    first = write_split(tmp_path, tokens=["a"] * 100)
    assert len(read_gguf(first).tensors) == 3
    monkeypatch.setattr(header, "_Limits", functools.partial(header._Limits, items=250))
    with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf is damaged: it claims 100 items"):
        read_gguf(first)


# ------------------------------------------------------------------------------------------------------------ bad files

NUMBER = struct.pack("<I", 1)

BAD = {
    "no magic": (lambda path: path.write_bytes(bytes(64)), "does not begin with 'GGUF'"),
    "empty": (lambda path: path.write_bytes(b""), "does not begin with 'GGUF'"),
    "version 1": (lambda path: raw(path, version=1), "of version 1. Supported"),
    "big-endian": (lambda path: raw(path, version=3 << 24), "big-endian"),
    "too many tensors": (lambda path: raw(path, num_tensors=2**63), "claims 9223372036854775808 tensors"),
    "too many values": (lambda path: raw(path, num_values=2**64 - 1), "metadata values"),
    "no tensors": (lambda path: raw(path, tensors=[]), "holds no tensors"),
    "duplicate key": (lambda path: raw(path, [value("k", U32, NUMBER)] * 2), "the key 'k' is there twice"),
    "long key": (lambda path: raw(path, [value("k" * 1025, U32, NUMBER)]), "1025 bytes of a text"),
    "long text": (lambda path: raw(path, [value("k", TEXT, struct.pack("<Q", 2**64 - 1))]), "bytes of a text"),
    "value type": (lambda path: raw(path, [value("k", 13, NUMBER)]), "value type 13, which is not known"),
    "nested list": (
        lambda path: raw(path, [value("k", ARRAY, array(ARRAY, 1, array(U32, 1, NUMBER)))]),
        "list of the value type 9, which is not supported",
    ),
    "long list of numbers": (lambda path: raw(path, [value("k", ARRAY, array(0, 2**40, b""))]), "items of the list"),
    "long list of texts": (lambda path: raw(path, [value("k", ARRAY, array(TEXT, 2**60, b""))]), "items of the list"),
    "long text in a list": (
        lambda path: raw(path, [value("k", ARRAY, array(TEXT, 1, struct.pack("<Q", 2**63)))]),
        "header needs at least",
    ),
    "alignment of 3": (
        lambda path: raw(path, [value("general.alignment", U32, struct.pack("<I", 3))]),
        "is 3, expected a power of two",
    ),
    "alignment of 0": (lambda path: raw(path, [value("general.alignment", U32, bytes(4))]), "is 0, expected a power"),
    "alignment as text": (
        lambda path: raw(path, [value("general.alignment", TEXT, text("32"))]),
        "is '32', expected a power",
    ),
    "no dimension": (lambda path: raw(path, tensors=[tensor(sizes=())]), "has 0 dimensions"),
    "five dimensions": (lambda path: raw(path, tensors=[tensor(sizes=(1,) * 5)]), "has 5 dimensions"),
    "size of 0": (lambda path: raw(path, tensors=[tensor(sizes=(4, 0))]), r"sizes \[4, 0\]"),
    "huge sizes": (lambda path: raw(path, tensors=[tensor(sizes=(2**63,) * 4)]), "more than the file can hold"),
    "unknown type": (lambda path: raw(path, tensors=[tensor(kind=4)]), "tensor type number 4, which is not supported"),
    "unsupported type": (lambda path: raw(path, tensors=[tensor(kind=16)]), r"IQ2_XXS \(16\).*Supported: F32"),
    "part of a block": (lambda path: raw(path, tensors=[tensor(sizes=(48,), kind=Q4_0)]), "rows of 48 values"),
    "odd offset": (lambda path: raw(path, tensors=[tensor(offset=8)]), "begins at 8, no multiple of 32"),
    "beyond the end": (lambda path: raw(path, tensors=[tensor(offset=64)]), "cut short: tensor 'a' ends at byte"),
    "far beyond": (lambda path: raw(path, tensors=[tensor(offset=2**64 - 32)]), "cut short: tensor 'a' ends at"),
    "overlap": (
        lambda path: raw(path, tensors=[tensor("a", (12,)), tensor("b", offset=32)]),
        "data of tensors 'a' and 'b' overlap",
    ),
    "same name": (lambda path: raw(path, tensors=[tensor(), tensor(offset=32)]), "two tensors have the same name"),
    "folder": (lambda path: path.mkdir(), "not a regular file"),
    "pipe": (os.mkfifo, "not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "missing": (lambda path: None, "cannot be read: No such file"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_refused(what, tmp_path):
    make, said = BAD[what]
    make(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=said) as caught:
        read_gguf(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(caught.value) and len(str(caught.value)) < 1000


def test_a_path_with_a_null_character_is_refused():
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf(Path("a\0b.gguf"))


def test_a_file_truncated_at_any_byte_is_refused(tmp_path):
    content = write_good(tmp_path / "m.gguf").read_bytes()
    last = max(t.start + t.num_bytes for t in read_gguf(tmp_path / "m.gguf").tensors.values())
    path = tmp_path / "cut.gguf"
    for length in range(0, last, 3):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError):
            read_gguf(path)
    path.write_bytes(content[:last])
    assert len(read_gguf(path).tensors) == 2


@pytest.mark.parametrize(
    "values",
    [
        [value("k", ARRAY, array(F32, 2**33, b""))],  # a list of 2**33 numbers
        [value("k", ARRAY, array(TEXT, 7_000_000, struct.pack("<Q", 2**35)))],  # a text of 32 GB
        [value("k", TEXT, struct.pack("<Q", 2**36))],
    ],
    ids=["list", "text in a list", "text"],
)
def test_a_large_sparse_file_takes_little_memory(values, tmp_path):
    path = raw(tmp_path / "m.gguf", values)
    os.truncate(path, 2**40)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_the_size_of_a_header_is_limited(tmp_path, monkeypatch):
    path = raw(tmp_path / "m.gguf", [value(f"k{i}", TEXT, text("x" * 1000)) for i in range(20)])
    assert len(read_gguf(path).metadata) == 20
    monkeypatch.setattr(header, "_Limits", functools.partial(header._Limits, header_bytes=10_000))
    with pytest.raises(ModelError, match="its header has more than the allowed 10000 bytes"):
        read_gguf(path)


@settings(max_examples=300)
@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, 2000),
            st.one_of(
                st.binary(min_size=1, max_size=3),
                st.sampled_from([struct.pack("<Q", n) for n in (0, 2**31, 2**63, 2**64 - 1)]),
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_file_with_any_damage_is_read_or_refused(tmp_path_factory, changes):
    folder = tmp_path_factory.getbasetemp()
    if not (folder / "good.gguf").exists():
        write_good(folder / "good.gguf")
    content = bytearray((folder / "good.gguf").read_bytes())
    for position, damage in changes:
        start = position % len(content)
        content[start : start + len(damage)] = damage
    path = folder / "damaged.gguf"
    path.write_bytes(content)
    try:
        model = read_gguf(path)
    except ModelError:
        return
    for entry in model.tensors.values():
        assert entry.start > 0 and entry.start + entry.num_bytes <= len(content)
