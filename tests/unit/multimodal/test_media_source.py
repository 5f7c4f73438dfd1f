"""What users pass as an item, and what is read for it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mvllm.config.multimodal import MultiModalConfig
from mvllm.errors import RequestError
from mvllm.multimodal.media_source import as_item_list, embeddings_source, load_source

CLOSED = MultiModalConfig(max_media_bytes=100)


def test_encoded_contents() -> None:
    data = b"\x00picture"
    text = base64.b64encode(data).decode()
    broken = f"{text[:4]}\r\n{text[4:]}\n"  # as tools for mail write it
    urls = f"data:image/png;base64,{text}", f"DATA:;base64,{text}", f"data:image/png;base64,{broken}"
    for value in (data, bytearray(data), *urls):
        source = load_source("image", value, CLOSED)
        assert (source.form, source.data) == ("encoded", data)
    assert load_source("image", "data:,a%20b", CLOSED).data == b"a b"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"", "no bytes"),
        (b"x" * 101, "101 bytes; 100 are allowed"),
        ("data:image/png;base64,####", "base64"),
        ("data:image/png;base64," + "A" * 400, "are allowed"),
        ("data:image/png", "no comma"),
        ("data:,\ud800", "not valid Unicode"),
        ("/etc/passwd", "may not be read"),
        ("file:///etc/passwd", "may not be read"),
        (5, "found 5"),
        (np.zeros((3, 3, 3), np.float32), "uint8 array"),
        (np.zeros((3, 3, 5), np.uint8), "uint8 array"),
        (None, "found"),
    ],
)
def test_contents_that_are_refused(value: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        load_source("image", value, CLOSED)


def test_files_below_the_allowed_folder_only(tmp_path: Path) -> None:
    folder, outside = tmp_path / "media", tmp_path / "secret.png"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a b.png").write_bytes(b"inside")
    (folder / "large.png").write_bytes(b"x" * 101)
    outside.write_bytes(b"outside")
    (folder / "link.png").symlink_to(outside)
    (folder / "inner.png").symlink_to(folder / "sub" / "a b.png")
    config = MultiModalConfig(allowed_local_media_path=str(folder), max_media_bytes=100)
    for name in ("sub/a b.png", str(folder / "sub/a b.png"), f"file://{folder}/sub/a%20b.png", folder / "inner.png"):
        assert load_source("image", name, config).data == b"inside"
    for name in ("../secret.png", str(outside), f"file://{outside}", "link.png", "nowhere.png", "sub", "\0"):
        with pytest.raises(RequestError, match=r"There is no file .* that may be read"):
            load_source("image", name, config)
    with pytest.raises(RequestError, match="names no host"):
        load_source("image", "file://other/x.png", config)
    with pytest.raises(RequestError, match="100 are allowed"):
        load_source("image", "large.png", config)


def test_arrays_and_images() -> None:
    image = Image.new("RGB", (4, 2), (1, 2, 3))
    source = load_source("image", image, CLOSED)
    assert (source.form, source.shape, source.data[:3]) == ("pixels", [2, 4, 3], b"\x01\x02\x03")
    assert load_source("image", image.convert("P"), CLOSED).shape == [2, 4, 3]
    assert load_source("image", np.zeros((2, 4), np.uint8), CLOSED).shape == [2, 4, 1]
    for mode in ("LA", "PA"):  # what is transparent becomes white when it is decoded, as that of files does
        assert load_source("image", Image.new(mode, (4, 2)), CLOSED).shape == [2, 4, 4]
    frames = load_source("video", [image, image], CLOSED)
    assert (frames.form, frames.shape, frames.fps) == ("frames", [2, 2, 4, 3], 24.0)
    assert load_source("video", (np.zeros((3, 2, 4, 3), np.uint8), {"fps": 5}), CLOSED).fps == 5.0
    with pytest.raises(RequestError, match="list of images"):
        load_source("video", [image, image.resize((3, 3))], CLOSED)
    sound = load_source("audio", (np.ones(5, np.float64), 8000), CLOSED)
    assert (sound.form, sound.shape, sound.sampling_rate) == ("samples", [5], 8000)
    assert load_source("audio", [0.5, 1.0], CLOSED).data == np.array([0.5, 1.0], np.float32).tobytes()
    for rate in (1.5, "16k", None, 10**400, float("nan")):
        with pytest.raises(RequestError, match="sampling rate"):
            load_source("audio", (np.ones(5, np.float32), rate), CLOSED)
    assert load_source("audio", (np.ones(5, np.float32), np.int64(8000)), CLOSED).sampling_rate == 8000
    with pytest.raises(RequestError, match="too large"):
        load_source("audio", [10**400], CLOSED)


def test_one_item_or_several() -> None:
    image = Image.new("RGB", (1, 1))
    assert as_item_list(image, "image") == [image]
    assert as_item_list([image, image], "image") == [image, image]
    assert as_item_list([image, image], "video") == [[image, image]]  # the frames of one video
    assert as_item_list([0.0, 1.0], "audio") == [[0.0, 1.0]]


class Tensor:
    """Has the methods of a tensor of torch that are used, so that the test need not import it."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    def detach(self) -> Tensor:
        return self

    cpu = float = detach

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.values


def test_embeddings() -> None:
    values = np.arange(6, dtype=np.float16).reshape(2, 3)
    found = embeddings_source(values, 3)
    assert (found.dtype, found.shape) == ("float32", [2, 3])
    assert np.frombuffer(found.data, np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert embeddings_source(Tensor(values[None]), 3) == found


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.zeros((2, 3), np.float32), r"shape \[tokens, 4\]"),
        (np.zeros((0, 4), np.float32), "at least one token"),
        (np.full((1, 4), np.nan, np.float32), "not finite"),
        (np.full((1, 4), np.inf, np.float32), "not finite"),
        (np.zeros((1, 4), np.int32), "float tensor"),
        ([[1.0]], "float tensor"),
    ],
)
def test_embeddings_that_are_refused(value: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        embeddings_source(value, 4)
