"""With torchvision, images and videos are prepared by transformers' processors; without it by Pillow and numpy.

Both give the same tokens, sizes and positions. Pixels differ by the rounding of filters: at most 2 of 255 levels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from transformers import AutoImageProcessor

from mvllm.multimodal import installed_packages
from mvllm.multimodal.contents import VideoContent
from mvllm.multimodal.item_families.frames import FrameProcessor
from mvllm.multimodal.item_families.smolvlm_processor import number_in_words
from mvllm.multimodal.item_processor import ItemProcessor
from mvllm.multimodal.processed_item import ProcessedItem
from tests.helpers.multimodal_suite import draw_image
from tests.helpers.multimodal_zoo import make_checkpoint, zoo
from tests.helpers.paged_driver import read_config
from tests.helpers.processed_items import as_arrays

pytest.importorskip("torchvision")
pytestmark = pytest.mark.exhaustive

NAMES = [name for name, entry in zoo().items() if entry.modality == "image" and "-" not in name.removesuffix("-images")]
VIDEOS = [name for name in NAMES if zoo()[name].video_placeholder]
LEVELS = 2.5 / 255
"""Largest difference of a pixel."""
STD = 0.26
"""Smallest deviation by which processors divide pixels."""
PICTURES = [(40, 24), (19, 50), (64, 64), (640, 480), (333, 1000)]
FILMS = [((60, 20), 6), ((24, 33), 3), ((24, 24), 1), ((320, 240), 4)]


def draw_video(size: tuple[int, int], count: int) -> VideoContent:
    frames = np.stack([np.asarray(draw_image(size, 20 + i)) for i in range(count)])
    return VideoContent(frames, 8.0, [5 * i for i in range(count)], 5 * count, 5 * count / 8.0)


def make_processor(folder: Path) -> ItemProcessor:
    config = read_config(folder)
    assert config.multimodal is not None
    return ItemProcessor(folder, config.architecture, config.multimodal, config.hf_config)


def without_torchvision(folder: Path) -> ItemProcessor:
    """As it is where torchvision and num2words are not installed."""
    with patch.object(installed_packages, "is_installed", lambda package: False):
        found = make_processor(folder)
    if not type(found.processor.image_processor).__name__.endswith("Pil"):  # transformers chooses by what is installed
        images = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
        found.processor.image_processor = images
    return found


def assert_equal(theirs: ProcessedItem, ours: ProcessedItem) -> None:
    """Equal tokens, sizes and positions; pixels with the rounding of filters."""
    assert theirs.replacement == ours.replacement
    assert theirs.token_ids == ours.token_ids and theirs.embedded == ours.embedded
    assert (theirs.placeholder, theirs.num_encoded) == (ours.placeholder, ours.num_encoded)
    assert (theirs.rope_positions, theirs.rope_length) == (ours.rope_positions, ours.rope_length)
    first, second = as_arrays(theirs.features), as_arrays(ours.features)
    assert first.keys() == second.keys()
    for key, values in first.items():
        assert values.shape == second[key].shape, key
        difference = np.abs(values.astype(np.float64) - second[key]).max()
        assert difference <= (LEVELS / STD if key.startswith("pixel") else 0), (key, difference)


@pytest.mark.parametrize("name", NAMES)
def test_images_and_videos_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path)
    theirs, ours = make_processor(tmp_path), without_torchvision(tmp_path)
    contents: list[tuple[str, Any]] = [("image", draw_image(size, i)) for i, size in enumerate(PICTURES)]
    if name in VIDEOS:
        contents += [("video", draw_video(size, count)) for size, count in FILMS]
        assert type(theirs.processor.video_processor).__module__.startswith("transformers.")
        assert isinstance(ours.processor.video_processor, FrameProcessor)
        assert theirs.family.frame_defaults() == ours.family.frame_defaults()
    assert type(theirs.processor).__module__.startswith("transformers.")
    assert not type(theirs.processor.image_processor).__name__.endswith("Pil")
    for modality, content in contents:
        for number in (1, 2):
            counts = {modality: number}
            assert_equal(*(each.process(modality, content, counts=counts) for each in (theirs, ours)))


@pytest.mark.parametrize("name", VIDEOS)
def test_defaults_of_frames_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Without settings of videos in the folder: published sizes and filters."""
    make_checkpoint(name, tmp_path)
    theirs, ours = make_processor(tmp_path), without_torchvision(tmp_path)
    kind = type(theirs.processor.video_processor)
    theirs.processor.video_processor = kind()
    (tmp_path / "video_preprocessor_config.json").write_text('{"do_resize": true}')
    ours.processor.video_processor = ours.family.frame_processor()
    video = draw_video((320, 240), 4)
    assert_equal(*(each.process("video", video, counts={"video": 1}) for each in (theirs, ours)))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "video_preprocessor_config.json").unlink(),
        lambda folder: (folder / "video_preprocessor_config.json").write_text('{"video_processor_type": "Unknown"}'),
    ],
)
def test_a_folder_without_usable_settings_of_videos(change: Callable[[Path], Any], tmp_path: Path) -> None:
    make_checkpoint("glm4v_moe", tmp_path)
    change(tmp_path)
    processor = make_processor(tmp_path)
    assert isinstance(processor.processor.video_processor, FrameProcessor)
    assert not type(processor.processor.image_processor).__name__.endswith("Pil")
    processor.process("image", draw_image((40, 24), 1), counts={"image": 1})
    processor.process("video", draw_video((60, 20), 3), counts={"video": 1})


def test_smolvlm_without_num2words_uses_torchvision(tmp_path: Path) -> None:
    make_checkpoint("smolvlm", tmp_path)
    ours = without_torchvision(tmp_path)
    with patch.object(installed_packages, "is_installed", lambda package: package == "torchvision"):
        found = make_processor(tmp_path)
    assert type(found.processor.video_processor).__module__.startswith("transformers.")
    video = draw_video((60, 20), 3)
    assert_equal(*(each.process("video", video, counts={"video": 1}) for each in (found, ours)))


def test_numbers_in_words_are_those_of_num2words() -> None:
    num2words = pytest.importorskip("num2words").num2words
    numbers = [*range(5000), 10_000, 12_345, 100_000, 999_999]
    assert [number_in_words(number) for number in numbers] == list(map(num2words, numbers))
