"""Audio of Gemma 4, as the processor's process sends it to the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mvllm.errors import RequestError
from mvllm.multimodal.contents import AudioContent
from mvllm.multimodal.item_processor import ItemProcessor
from tests.helpers.multimodal_zoo import make_checkpoint
from tests.helpers.paged_driver import read_config
from tests.helpers.processed_items import as_arrays
from tests.helpers.zoo_audio import GEMMA4_BINS

RATE = 16_000


def test_lengths_of_audio(tmp_path: Path) -> None:
    """Spectrograms have no padding. What the feature extractor would cut off is refused."""
    make_checkpoint("gemma4_audio", tmp_path)
    config = read_config(tmp_path)
    assert config.multimodal is not None
    processor = ItemProcessor(tmp_path, config.architecture, config.multimodal, config.hf_config)

    def processed(seconds: float) -> tuple[int, tuple[int, ...]]:
        audio = AudioContent(np.ones(int(seconds * RATE), np.float32), RATE)
        item = processor.process("audio", audio, counts={"audio": 1})
        assert item.replacement.startswith("<|audio><|audio|>") and item.replacement.endswith("<audio|>")
        return item.num_encoded, as_arrays(item.features)["input_features"].shape

    assert processed(0.05) == (1, (4, GEMMA4_BINS))
    assert processed(0.5) == (13, (49, GEMMA4_BINS))
    with pytest.raises(RequestError, match=r"has 30\.1 s; this model takes at most 30 s of each"):
        processed(30.1)
    with pytest.raises(RequestError, match="too short"):
        processed(0.005)
