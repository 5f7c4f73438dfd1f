"""MultiModalSuite for models that hear."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.multimodal_suite import MultiModalOracle, MultiModalRequest, MultiModalSuite, draw_text
from tests.helpers.multimodal_zoo import MultiModalEntry, make_checkpoint, zoo
from tests.helpers.zoo_audio import VOXTRAL_LENGTH

SAMPLING_RATE = 16_000


@dataclass(frozen=True)
class AudioRequest(MultiModalRequest):
    """A prompt with sounds: float32 [samples] each, in `images`."""

    def as_prompt(self, modality: str = "audio") -> dict[str, Any]:
        """As LLM.generate takes it."""
        if not self.images:
            return {"prompt": self.prompt}
        return {"prompt": self.prompt, "multi_modal_data": {modality: [(each, SAMPLING_RATE) for each in self.images]}}


def draw_sound(seconds: float, seed: int) -> Any:
    """Tones of random heights, each of a tenth of a second: float32 [samples]."""
    generator = np.random.default_rng(seed)
    count = int(seconds * SAMPLING_RATE)
    heights = generator.uniform(100, 4000, -(-count * 10 // SAMPLING_RATE)).repeat(SAMPLING_RATE // 10)[:count]
    noise = generator.normal(size=count)
    return (0.5 * np.sin(2 * np.pi * np.cumsum(heights) / SAMPLING_RATE) + 0.05 * noise).astype(np.float32)


def draw_audio_requests(entry: MultiModalEntry) -> list[AudioRequest]:
    """Eight requests: without sound, with one to three of different lengths, and with a sound that another one has.

    The lengths are the first of each pair in `entry.sizes`, in tenths of a second.
    """
    sounds = [draw_sound(length / 10, i) for i, (length, _) in enumerate(entry.sizes)]
    other = draw_sound(entry.sizes[0][0] / 10, 7)
    at, texts = entry.placeholder, (draw_text(length, i) for i, length in enumerate((25, 12, 9, 14, 60, 7, 20, 5, 40)))
    first, behind, *parts, last = texts
    shared = draw_text(30, "shared")
    return [
        AudioRequest(first),
        AudioRequest(shared + at + behind, (sounds[0],)),
        AudioRequest(parts[0] + at + parts[1] + at, (sounds[1], sounds[0])),
        AudioRequest(parts[2]),
        AudioRequest(at + parts[3] + at + parts[4] + at + parts[5], (sounds[2], sounds[1], sounds[0])),
        AudioRequest(shared + at + behind, (other,)),
        AudioRequest(shared + at + "other words", (sounds[0],)),
        AudioRequest(last + at + "end", (sounds[2],)),
    ]


@dataclass
class AudioOracle(MultiModalOracle):
    """transformers with sounds."""

    def inputs(self, request: MultiModalRequest) -> dict[str, Any]:
        sounds = list(request.images)
        if not sounds:
            return dict(self.processor.tokenizer([request.prompt], return_tensors="pt"))
        settings = {"sampling_rate": SAMPLING_RATE, "return_tensors": "pt"}
        if self.name.startswith("glmasr"):
            return self._one_by_one(request, settings)
        if not self.name.startswith("voxtral"):
            return dict(self.processor(text=[request.prompt], audio=sounds, **settings))
        # transformers' processor takes sounds in chats alone, which need the tokenizer of mistral_common.
        arguments = {**self.processor.audio_kwargs}
        windows = [self.processor._retrieve_input_features([sound], **arguments) for sound in sounds]
        first, *others = request.prompt.split(self.entry.placeholder)
        parts = [self.entry.placeholder * VOXTRAL_LENGTH * len(each) for each in windows]
        text = first + "".join(part + other for part, other in zip(parts, others, strict=True))
        return {**self.processor.tokenizer([text], return_tensors="pt"), "input_features": torch.cat(windows)}

    def _one_by_one(self, request: MultiModalRequest, settings: dict[str, Any]) -> dict[str, Any]:
        """For processors that take one sound of a text, though the model takes several."""
        at, text = self.entry.placeholder, request.prompt
        each = [self.processor(text=[at], audio=[sound], **settings) for sound in request.images]
        first, *others = text.split(at)
        parts = [at * int(one["input_ids"].shape[1]) for one in each]
        text = first + "".join(part + other for part, other in zip(parts, others, strict=True))
        features = {
            name: torch.cat([one[name] for one in each]) for name in each[0] if name.startswith("input_features")
        }
        return {**self.processor.tokenizer([text], return_tensors="pt"), **features}


def audio_oracle(name: str, zoo: Callable[[], Mapping[str, MultiModalEntry]] = zoo) -> AudioOracle:
    """The oracle of an entry; cached for the life of the process."""
    return _make_oracle(name, zoo)


@functools.cache
def _make_oracle(name: str, zoo: Callable[[], Mapping[str, MultiModalEntry]]) -> AudioOracle:
    entry = zoo()[name]
    folder = make_checkpoint(entry, Path(tempfile.mkdtemp(prefix="mvllm-audio-")) / name)
    requests: Sequence[Any] = draw_audio_requests(entry)
    return AudioOracle(name, entry, folder, list(requests))


class AudioSuite(MultiModalSuite):
    """The same tests with sounds in the place of images."""

    @pytest.fixture
    def expected(self, checkpoint: str) -> MultiModalOracle:
        return audio_oracle(checkpoint, self.zoo)
