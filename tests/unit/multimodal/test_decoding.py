"""Images, audio and videos are decoded within limits."""

from __future__ import annotations

import io
import struct
import sys
import wave
import zlib
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, ImageOps

from mvllm.errors import ConfigError, RequestError
from mvllm.multimodal.contents import AudioContent, VideoContent, hash_content
from mvllm.multimodal.decoding import DecodingLimits, decode
from mvllm.multimodal.frame_sampling import FrameSampling
from mvllm.multimodal.media_source import MediaSource

LIMITS = DecodingLimits(max_pixels=100_000, max_audio_seconds=2.0)


def decoded(data: bytes, modality: str = "image", sampling: FrameSampling | None = None) -> Any:
    source = MediaSource(modality, "encoded", data)
    return decode(source, LIMITS, sampling_rate=8000, sampling=sampling or FrameSampling())


def file_of(image: Image.Image, form: str = "PNG", **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **settings)
    return file.getvalue()


def picture(mode: str = "RGB", size: tuple[int, int] = (40, 20)) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that claims to have width x height pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9999))) + chunk(b"IEND", b"")
    )


# --- images


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "WEBP", "JPEG", "GIF"])
def test_image_formats(form: str) -> None:
    settings = {"lossless": True} if form == "WEBP" else {}
    found = decoded(file_of(picture(), form, **settings))
    assert (found.mode, found.size) == ("RGB", (40, 20))
    if form not in ("JPEG", "GIF"):
        assert found.tobytes() == picture().tobytes()


def test_equal_pixels_have_equal_hashes_whatever_the_format() -> None:
    contents = [decoded(file_of(picture(), form)) for form in ("PNG", "BMP")]
    assert len({hash_content(each, b"salt") for each in contents}) == 1
    assert hash_content(contents[0], b"salt") != hash_content(contents[0], b"other")
    assert hash_content(contents[0], b"") != hash_content(contents[0].transpose(Image.Transpose.ROTATE_90), b"")


def test_the_orientation_of_exif_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    found = decoded(file_of(picture(), exif=exif))
    assert found.size == (20, 40)
    assert found.tobytes() == picture().transpose(Image.Transpose.ROTATE_270).tobytes()


@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_is_that_of_pillow(orientation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = file_of(picture(), exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))

    def fail(*unused: Any) -> None:
        raise ValueError("other tags are damaged")

    monkeypatch.setattr(Image.Exif, "tobytes", fail)
    found = decoded(file)
    assert (found.size, found.tobytes()) == (expected.size, expected.tobytes())


def test_what_is_transparent_becomes_white() -> None:
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert decoded(file_of(clear)).getpixel((0, 0)) == (255, 255, 255)
    indexed = Image.new("P", (2, 2), 0)
    assert decoded(file_of(indexed, transparency=0)).getpixel((0, 0)) == (255, 255, 255)
    assert decoded(file_of(indexed)).getpixel((0, 0)) == (0, 0, 0)


def test_sixteen_bits_are_scaled() -> None:
    values = Image.fromarray(np.full((2, 2), 0x8080, np.uint16))
    assert decoded(file_of(values)).getpixel((0, 0)) == (128, 128, 128)


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    found = decoded(file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert found.getpixel((0, 0)) == (255, 0, 0)


def test_one_pixel() -> None:
    assert decoded(file_of(Image.new("RGB", (1, 1)))).size == (1, 1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (bomb(60_000, 60_000), "60000 x 60000 pixels; 100000 are allowed"),
        (bomb(2**31 - 1, 2**31 - 1), "pixels|damaged"),
        (bomb(70_000, 1), "70000 x 1 pixels"),
        (bomb(1, 201), "1 x 201 pixels, differ by more than 200 times"),
        (file_of(picture())[:-200], "damaged or truncated"),
        (file_of(picture(), "JPEG")[:-200], "damaged or truncated"),
        (file_of(picture())[:20], "none of PNG"),
        (b"\n <SVG xmlns='http://www.w3.org/2000/svg'/>", "SVG, HTML"),
        (b"<!DOCTYPE html><html></html>", "SVG, HTML"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>", "SVG, HTML"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "none of PNG"),
        (b"\x00" * 100, "none of PNG"),
        (b"GIF89a" + b"\xff" * 100, "damaged|pixels|none of PNG"),
    ],
)
def test_images_that_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        decoded(data)
    assert caught.value.parameter == "multi_modal_data" and str(caught.value).startswith("An image cannot be read")


@pytest.mark.parametrize(("modality", "package", "module"), [("image", "Pillow", "PIL.Image"), ("audio", "av", "av")])
def test_a_missing_package_is_named_with_its_extra(
    modality: str, package: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"need the package {package}.*pip install 'av.*' 'pillow"):
        decoded(b"x", modality)


def test_pixels_beyond_the_limit() -> None:
    with pytest.raises(RequestError, match="1000 x 1000 pixels"):
        decode(
            MediaSource("image", "pixels", bytes(3_000_000), "uint8", [1000, 1000, 3]),
            LIMITS,
            sampling_rate=0,
            sampling=FrameSampling(),
        )


# --- audio


def sound(seconds: float, rate: int = 16000, channels: int = 2) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        time = np.arange(int(seconds * rate)) / rate
        tone = (np.sin(2 * np.pi * 440 * time) * 16384).astype("<i2")
        out.writeframes(np.repeat(tone, channels).tobytes())
    return file.getvalue()


def test_audio_is_one_channel_at_the_rate_of_the_processor() -> None:
    found = decoded(sound(1.0), "audio")
    assert isinstance(found, AudioContent)
    assert found.samples.dtype == np.float32 and found.sampling_rate == 8000
    assert abs(len(found.samples) - 8000) < 50
    spectrum = np.abs(np.fft.rfft(found.samples[1000:7000]))
    assert abs(spectrum.argmax() * 8000 / 6000 - 440) < 3  # the tone
    assert 0.45 < np.abs(found.samples[1000:7000]).max() < 0.55


def test_samples_are_resampled() -> None:
    samples = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000).astype(np.float32)
    source = MediaSource("audio", "samples", samples.tobytes(), "float32", [16000], sampling_rate=16000)
    found = decode(source, LIMITS, sampling_rate=8000, sampling=FrameSampling())
    assert abs(len(found.samples) - 8000) < 50
    kept = MediaSource("audio", "samples", samples.tobytes(), "float32", [16000], sampling_rate=8000)
    assert decode(kept, LIMITS, sampling_rate=8000, sampling=FrameSampling()).samples.tolist() == samples.tolist()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (sound(2.5), "longer than 2 s"),
        (b"<html></html>", "a text"),
        (b"RIFF" + b"\x00" * 50, "cannot be decoded"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "cannot be decoded|no audio|a text"),
        (file_of(picture()), "no audio|cannot be decoded|no samples"),
    ],
)
def test_audio_that_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        decoded(data, "audio")


# --- videos


def film(num_frames: int = 12, size: tuple[int, int] = (32, 16), fps: int = 6) -> bytes:
    """A video whose frame i has the brightness 20 * i."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for i in range(num_frames):
            frame = np.full((size[1], size[0], 3), 20 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(
    ("sampling", "indices"),
    [
        (FrameSampling(), list(range(12))),
        (FrameSampling(num_frames=4), [0, 4, 7, 11]),
        (FrameSampling(num_frames=1), [0]),
        (FrameSampling(fps=2.0), [0, 4, 7, 11]),
        (FrameSampling(num_frames=100), list(range(12))),
    ],
)
def test_frames_of_a_video(sampling: FrameSampling, indices: list[int]) -> None:
    found = decoded(film(), "video", sampling)
    assert isinstance(found, VideoContent)
    assert (found.indices, found.total_frames, found.fps) == (indices, 12, 6.0)
    assert found.frames.shape == (len(indices), 16, 32, 3)
    assert np.allclose(found.frames.mean(axis=(1, 2, 3)), [20 * i for i in indices], atol=4)


def test_fewer_frames_of_a_large_video_are_used_unless_their_number_is_asked_for() -> None:
    large = film(size=(256, 100))  # 100,000 pixels are 3 frames
    assert decoded(large, "video").indices == [0, 6, 11]
    array = MediaSource("video", "frames", bytes(12 * 100 * 256 * 3), "uint8", [12, 100, 256, 3], fps=1.0)
    assert decode(array, LIMITS, sampling_rate=0, sampling=FrameSampling()).indices == [0, 6, 11]
    for sampling in (FrameSampling(num_frames=4), FrameSampling(fps=6.0)):
        with pytest.raises(RequestError, match="100000 pixels allowed"):
            decoded(large, "video", sampling)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lambda: film(size=(400, 300)), "frames of 400 x 300|400 x 300 pixels"),
        (lambda: film(size=(4000, 16)), "4000 x 16 pixels, differ too much"),
        (lambda: film()[:300], "cannot be decoded|no frame|no frames"),
        (lambda: b"<html>", "a text"),
        (lambda: sound(0.1), "no video"),
    ],
)
def test_videos_that_are_refused(data: Callable[[], bytes], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        decoded(data(), "video")


@pytest.mark.parametrize("settings", [{"num_frames": 0}, {"num_frames": "4"}, {"fps": -1}, {"num_frames": 1, "fps": 1}])
def test_settings_of_sampling_that_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        FrameSampling.from_settings(settings)
    assert caught.value.parameter == "mm_processor_kwargs"
