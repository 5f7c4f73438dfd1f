"""The formats of a transcription: json, text, srt, vtt and verbose_json."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mvllm.entrypoints.openai.common.json_response import encode_json

MEDIA_TYPES = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "text/plain; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}
"""By `response_format`."""


@dataclass(frozen=True)
class Segment:
    """The text of a window.

    Attributes:
        start, end: Seconds.
        text: With white space around it as generated.
        token_ids: Of the text, without those of its prompt.
        average_logprob: Mean log-probability of the tokens.
    """

    start: float
    end: float
    text: str
    token_ids: Sequence[int]
    average_logprob: float


@dataclass(frozen=True)
class Transcription:
    """The text of an audio.

    Attributes:
        task: `transcribe` or `translate`.
        language: Code of the audio's language.
        duration: Seconds.
        temperature: Of sampling.
        segments: In order.
    """

    task: str
    language: str
    duration: float
    temperature: float
    segments: Sequence[Segment]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments).strip()

    def encode(self, response_format: str) -> bytes:
        """The body of a response."""
        if response_format == "text":
            return f"{self.text}\n".encode()
        if response_format == "srt":
            parts = [
                f"{i}\n{_time(s.start, ',')} --> {_time(s.end, ',')}\n{s.text.strip()}\n"
                for i, s in enumerate(self.segments, 1)
            ]
            return "\n".join(parts).encode()
        if response_format == "vtt":
            parts = [f"{_time(s.start, '.')} --> {_time(s.end, '.')}\n{s.text.strip()}\n" for s in self.segments]
            return "\n".join(["WEBVTT\n", *parts]).encode()
        usage = {"type": "duration", "seconds": round(self.duration)}
        if response_format == "json":
            return encode_json({"text": self.text, "usage": usage})
        body = {
            "task": self.task,
            "language": self.language,
            "duration": self.duration,
            "text": self.text,
            "segments": [self._verbose(i, segment) for i, segment in enumerate(self.segments)],
            "usage": usage,
        }
        return encode_json(body)

    def _verbose(self, index: int, segment: Segment) -> dict[str, Any]:
        raw = segment.text.encode()
        return {
            "id": index,
            "seek": round(segment.start * 100),  # frames of the spectrogram
            "start": segment.start,
            "end": segment.end,
            "text": segment.text,
            "tokens": list(segment.token_ids),
            "temperature": self.temperature,
            "avg_logprob": segment.average_logprob,
            "compression_ratio": len(raw) / len(zlib.compress(raw)),
            "no_speech_prob": None,
        }


def _time(seconds: float, point: str) -> str:
    """hh:mm:ss and milliseconds."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
