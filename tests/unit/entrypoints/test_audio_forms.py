"""Forms with audio files, and the formats of transcriptions."""

from __future__ import annotations

import json
import tracemalloc

import httpx2
import pytest

from mvllm.entrypoints.openai.audio.audio_routes import read_fields
from mvllm.entrypoints.openai.audio.form import parse_form
from mvllm.entrypoints.openai.audio.formats import Segment, Transcription
from mvllm.entrypoints.openai.common.errors import APIError

BINARY = bytes(range(256)) + b"\r\n--\r\n\r\n"


def _form(**fields: str | list[str]) -> tuple[str, bytes]:
    """Content type and body of a form with a file, as httpx2 writes it."""
    request = httpx2.Request("POST", "http://x", data=fields, files={"file": ('a "1".wav', BINARY, "audio/wav")})
    return request.headers["content-type"], request.read()


def test_a_form_has_the_bytes_of_its_file_and_all_values_of_a_field() -> None:
    fields = parse_form(*_form(model="m", prompt="Grüße", many=["a", "b"]))
    assert fields == {"file": [BINARY], "model": [b"m"], "prompt": ["Grüße".encode()], "many": [b"a", b"b"]}


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\ncut off'),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--"),
        ("multipart/form-data; boundary=x", b"--x\r\nno end of headers\r\n--x--"),
        ("multipart/form-data; boundary=x", b"\r\n--x\r\n" * 100 + b"--x--"),
    ],
)
def test_a_damaged_form_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(APIError) as caught:
        parse_form(content_type, body)
    assert caught.value.status == 400


def test_a_form_of_many_fields_is_not_taken_apart() -> None:
    body = b"\r\n--x" * 500_000
    tracemalloc.start()
    with pytest.raises(APIError):
        parse_form("multipart/form-data; boundary=x", body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.2 * len(body)  # two copies; a list of the parts would take three more


def test_fields_have_their_types() -> None:
    found = read_fields({"temperature": [b"0.5"], "stream": [b"false"], "timestamp_granularities[]": [b"segment"]})
    assert (found.temperature, found.stream, found.timestamp_granularities) == (0.5, False, ["segment"])
    with pytest.raises(APIError, match="temperature"):
        read_fields({"temperature": [b"warm"]})


def test_times_of_long_audio() -> None:
    segments = [Segment(3600.0 * i, 3600.0 * i + 29.9996, f" part {i}", [7], -0.5) for i in range(2)]
    found = Transcription("transcribe", "en", 3630.0, 0.0, segments)
    assert found.encode("srt").decode().endswith("2\n01:00:00,000 --> 01:00:30,000\npart 1\n")
    assert found.encode("vtt").decode().startswith("WEBVTT\n\n00:00:00.000 --> 00:00:30.000\npart 0\n")
    assert json.loads(found.encode("verbose_json"))["segments"][1]["seek"] == 360_000
    assert found.text == "part 0 part 1"
