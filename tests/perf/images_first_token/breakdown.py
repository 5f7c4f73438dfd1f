"""Where the time to the first token goes: the parts of the engine, in this process, measured around their calls."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mvllm.config.engine_config import EngineConfig
from mvllm.multimodal.decoding import DecodingLimits, decode
from mvllm.multimodal.frame_sampling import FrameSampling
from mvllm.multimodal.item_processor import ItemProcessor
from mvllm.multimodal.media_source import MediaSource
from mvllm.multimodal.processor_client import ProcessorClient
from mvllm.worker.decoder_forward import DecoderForward
from mvllm.worker.encoder_runner import EncoderRunner
from mvllm.worker.model_runner import ModelRunner

_PARTS: tuple[tuple[str, type, str], ...] = (
    ("decoding and processing", ProcessorClient, "_process_item"),
    ("features to the device", EncoderRunner, "_upload"),
    ("tower and projector", EncoderRunner, "encode"),
    ("language model", DecoderForward, "run"),
    ("a step of the worker", ModelRunner, "execute_model"),
)
_WITHIN = {
    "tower and projector": "features to the device",
    "a step of the worker": "tower and projector, language model",
}


class Breakdown:
    """Seconds of each part, for each picture.

    Attributes:
        seconds: By part, those of the pictures so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._current: dict[str, float] = {}
        for part, owner, name in _PARTS:
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._current[part] = self._current.get(part, 0.0) + time.perf_counter() - start

        return timed

    def next_picture(self, total: float, *, keep: bool) -> None:
        """The parts so far are those of one picture.

        Args:
            total: Seconds from the file to the token.
            keep: Whether the picture counts.
        """
        if keep:
            for part, seconds in {"all": total, **self._current}.items():
                self.seconds.setdefault(part, []).append(seconds)
        self._current.clear()

    def report(self) -> str:
        """Medians in milliseconds."""
        lines = []
        for part, seconds in self.seconds.items():
            within = f"   with {_WITHIN[part]}" if part in _WITHIN else ""
            lines.append(f"{part:28} {statistics.median(seconds) * 1e3:7.2f} ms{within}")
        return "\n".join(lines)


def time_processor(config: EngineConfig, pictures: Sequence[str]) -> str:
    """Decoding and processing of each picture in this process with one thread, as the processor's process does."""
    import torch

    torch.set_num_threads(1)
    model = config.model
    assert model.multimodal is not None
    processor = ItemProcessor(
        model.path, model.architecture, model.multimodal, model.hf_config, float_dtype=model.dtype
    )
    limits, sampling = DecodingLimits(1 << 26, 60.0), FrameSampling.from_settings({})
    seconds: dict[str, list[float]] = {"of it: decoding": [], "of it: processing": []}
    for picture in pictures:
        source = MediaSource("image", "encoded", Path(picture).read_bytes())
        times = [time.perf_counter()]
        content = decode(source, limits, sampling_rate=0, sampling=sampling)
        times.append(time.perf_counter())
        processor.process("image", content, counts={"image": 1})
        times.append(time.perf_counter())
        for part, start, stop in zip(seconds, times, times[1:], strict=False):
            seconds[part].append(stop - start)
    return "\n".join(f"{part:28} {statistics.median(each) * 1e3:7.2f} ms" for part, each in seconds.items())
