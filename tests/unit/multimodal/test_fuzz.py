"""Mutated files of every kind: the processor's process answers with an error, and lives or is replaced.

python -m tests.unit.multimodal.test_fuzz 600    the same for ten minutes, with other mutations
"""

from __future__ import annotations

import io
import random
import sys
import time
import wave
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalConfig, MultiModalModel
from mvllm.errors import RequestError
from mvllm.multimodal import processor_client
from mvllm.multimodal.processor_client import ProcessorClient

MODEL: Any = SimpleNamespace(
    model_impl="auto",
    model="model",
    path=Path("/nowhere"),
    architecture="SomeModel",
    dtype="float32",
    trust_remote_code=False,
    multimodal=MultiModalModel(placeholders={"image": 4, "video": 5, "audio": 6}),
    hf_config=HFConfig({}, "config.json"),
    hidden_size=3,
    max_model_len=10,
)
LIMITS = MultiModalConfig(max_pixels=1_000_000, max_audio_seconds=10, num_processes=1, processor_cache_bytes=0)
MEMORY_BYTES = 600 << 20
"""Most memory of the process between two files. Decoders and Python take about 150 MB."""
_WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)


def image_file(form: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def wav_file() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setparams((1, 2, 8000, 0, "NONE", ""))
        target.writeframes(np.arange(4000, dtype=np.int16).tobytes())
    return file.getvalue()


def video_file(form: str, codec: str, pixel_format: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 16, pixel_format
        for i in range(6):
            frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), 40 * i, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def files() -> list[tuple[str, bytes]]:
    """Modality and content of each file."""
    found = [("image", image_file(form)) for form in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM")]
    kinds = (("mp4", "mpeg4", "yuv420p"), ("matroska", "mpeg4", "yuv420p"), ("avi", "mjpeg", "yuvj420p"))
    return [*found, ("audio", wav_file()), *(("video", video_file(*each)) for each in kinds)]


FILES = files()


def mutate(data: bytes, dice: random.Random) -> bytes:
    """The file with a few bytes changed, or pieces removed, repeated or moved."""
    found = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 4, 16))):
        place = min(dice.randrange(len(found) + 1), dice.randrange(len(found) + 1))  # headers matter most
        length = dice.choice((1, 2, 4, 4, 16, 64))
        match dice.randrange(6):
            case 0:
                found[place : place + length] = dice.randbytes(length)
            case 1:
                size = dice.choice((1, 2, 4))
                word = dice.choice(_WORDS) & ((1 << 8 * size) - 1)
                found[place : place + size] = word.to_bytes(size, dice.choice(("little", "big")))
            case 2:
                del found[place : place + length]
            case 3:
                found[place:place] = found[place : place + length] * dice.choice((1, 1, 50))
            case 4:
                del found[place:]
            case _:
                other = dice.randrange(len(found) + 1)
                found[place : place + length] = found[other : other + length]
        if not found:
            return b"\x00"
    return bytes(found)


class Target:
    """A client, and what it has answered."""

    def __init__(self, client: ProcessorClient) -> None:
        self.client = client
        self.answers: Counter[str] = Counter()
        self.most_memory = 0
        self.pids: set[int] = set()

    def send(self, modality: str, data: bytes) -> None:
        try:
            [item] = self.client.process({"multi_modal_data": {modality: data}})
            assert item.modality == modality
            self.answers["processed"] += 1
        except RequestError as e:  # any other error fails the test
            assert "\n" not in str(e), e
            self.answers["crashed" if "crashed" in str(e) else "slow" if "more than 60 s" in str(e) else "refused"] += 1
        for pid in self.client.pids:
            self.pids.add(pid)
            self.most_memory = max(self.most_memory, psutil.Process(pid).memory_info().rss)
        assert self.most_memory < MEMORY_BYTES


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with pytest.MonkeyPatch.context() as patch, closing(ProcessorClient(MODEL, LIMITS)) as client:
        patch.setattr(processor_client, "_MODULE", "tests.helpers.scripted_processor")
        target = Target(client)
        for modality, data in FILES:
            target.send(modality, data)
        assert target.answers == {"processed": len(FILES)}
        yield target
        for modality, data in FILES:
            target.send(modality, data)
        assert target.answers["processed"] >= 2 * len(FILES)


@given(st.integers(0, 2**64), st.sampled_from(range(len(FILES))))
@settings(max_examples=400, derandomize=True, deadline=None, database=None)
def test_mutated_files_are_refused_or_processed(target: Target, seed: int, number: int) -> None:
    modality, data = FILES[number]
    target.send(modality, mutate(data, random.Random(seed)))


def main(seconds: float, seed: float = 0) -> None:
    """Sends mutated files for a while, and prints what the answers were."""
    processor_client._MODULE = "tests.helpers.scripted_processor"
    dice, end = random.Random(seed), time.monotonic() + seconds
    with closing(ProcessorClient(MODEL, LIMITS)) as client:
        target = Target(client)
        while time.monotonic() < end:
            modality, data = FILES[dice.randrange(len(FILES))]
            target.send(modality, mutate(data, dice))
        for modality, data in FILES:
            target.send(modality, data)
        print(dict(target.answers), f"{len(target.pids)} processes, at most {target.most_memory >> 20} MB")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
