"""Videos as the processor's process sends them to the engine: which frames, their text, and their features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.entrypoints.chat_items import places_to_text
from mvllm.errors import ModelError, RequestError
from mvllm.families.glm.items import GlmItems
from mvllm.families.qwen_vl.items import Qwen3Items
from mvllm.multimodal.contents import VideoContent
from mvllm.multimodal.frame_sampling import FrameDefaults, FrameSampling
from mvllm.multimodal.item_families.frames import (
    SquareFrames,
    SquareRules,
    TwiceResizedFrames,
    TwiceResizedRules,
    proportional_size,
)
from mvllm.multimodal.item_families.interface import ItemFamily
from mvllm.multimodal.item_families.smolvlm_processor import number_in_words
from mvllm.multimodal.item_processor import ItemProcessor
from mvllm.multimodal.processed_item import ProcessedItem
from tests.helpers.multimodal_suite import draw_image
from tests.helpers.multimodal_zoo import make_checkpoint
from tests.helpers.paged_driver import read_config
from tests.helpers.processed_items import as_arrays

IMAGE = {"smolvlm": "<image>", "internvl": "<IMG_CONTEXT>", "llava_onevision": "<video>", "gemma4-images": "<|video|>"}


def draw_video(count: int, fps: float) -> VideoContent:
    frames = np.stack([np.asarray(draw_image((40, 24), seed)) for seed in range(count)])
    return VideoContent(frames, fps, [8 * i for i in range(count)], 8 * count, 8 * count / fps)


def processed(name: str, folder: Path, video: VideoContent) -> ProcessedItem:
    make_checkpoint(name, folder)
    config = read_config(folder)
    assert config.multimodal is not None
    processor = ItemProcessor(folder, config.architecture, config.multimodal, config.hf_config)
    return processor.process("video", video, counts={"video": 1})


@pytest.mark.parametrize(
    ("name", "text", "features"),
    [
        (
            "smolvlm",
            "You are provided the following series of two frames from a 0:01:20 [H:MM:SS] video.\n"
            "\nFrame from 00:00:<fake_token_around_image><global-img>{4}<fake_token_around_image>"
            "\nFrame from 00:40:<fake_token_around_image><global-img>{4}<fake_token_around_image>\n\n",
            {"pixel_values": (1, 2, 3, 16, 16)},
        ),
        ("internvl", "Frame1: <img>{4}</img>\nFrame2: <img>{4}</img>", {"pixel_values": (2, 3, 16, 16)}),
        ("llava_onevision", "{9}", {"pixel_values_videos": (1, 2, 3, 24, 24)}),
        (
            "gemma4-images",
            "00:00 <|image>{60}<image|> 00:40 <|image>{60}<image|>",
            {"pixel_values_videos": (2, 630, 48), "video_position_ids": (2, 630, 2)},
        ),
    ],
)
def test_each_frame_has_placeholders(
    name: str, text: str, features: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    item = processed(name, tmp_path, draw_video(2, 0.2))
    for count in (4, 9, 60):
        text = text.replace(f"{{{count}}}", IMAGE[name] * count)
    assert item.replacement == text
    assert {key: array.shape for key, array in as_arrays(item.features).items()} == features
    assert item.num_embeddings == item.num_encoded == item.token_ids.count(item.embedded_id)
    assert len(item.embedded) == (1 if name == "llava_onevision" else 2)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (19, "nineteen"),
        (20, "twenty"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (215, "two hundred and fifteen"),
        (1000, "one thousand"),
        (4096, "four thousand and ninety-six"),
        (1121, "one thousand, one hundred and twenty-one"),
    ],
)
def test_numbers_in_words_are_those_of_num2words(number: int, words: str) -> None:
    assert number_in_words(number) == words


@pytest.mark.parametrize(
    ("defaults", "total", "fps", "indices"),
    [
        (FrameDefaults(), 40, 8.0, [round(i * 39 / 31) for i in range(32)]),
        (FrameDefaults(num_frames=4), 12, 6.0, [0, 4, 7, 11]),
        (FrameDefaults(num_frames=4, placement="starts"), 12, 6.0, [0, 3, 6, 9]),
        (FrameDefaults(num_frames=4, placement="middles"), 12, 6.0, [1, 4, 7, 10]),
        (FrameDefaults(num_frames=1, placement="middles"), 5, 6.0, [2]),
        (FrameDefaults(fps=1.0), 12, 4.0, [0, 6, 11]),
        (FrameDefaults(fps=1.0, num_frames=2), 12, 4.0, [0, 11]),
        (FrameDefaults(fps=1.0, fewest=4), 12, 4.0, [0, 4, 7, 11]),
        (FrameDefaults(fps=4.0, most=3), 12, 4.0, [0, 6, 11]),
        (FrameDefaults(fps=0.1), 12, 4.0, [0]),
        (FrameDefaults(fps_by_duration=((3.0, 1.0), (60.0, 0.5))), 12, 4.0, [0, 6, 11]),
        (FrameDefaults(fps_by_duration=((2.0, 1.0), (60.0, 1.5))), 12, 4.0, [0, 4, 7, 11]),
    ],
)
def test_frames_that_a_model_uses(defaults: FrameDefaults, total: int, fps: float, indices: list[int]) -> None:
    assert FrameSampling(defaults=defaults).indices(total, fps) == indices
    assert len(FrameSampling(defaults=defaults).indices(total, fps, most=2)) == min(len(indices), 2)
    assert len(FrameSampling(num_frames=6, defaults=defaults).indices(total, fps, most=2)) == min(6, total)


def frames_of(kind: type[ItemFamily], processor_name: str, folder: Path, **settings: Any) -> FrameDefaults:
    """The defaults of a family for a folder with settings of videos."""
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"patch_size": 4, **settings}))
    processor = type(processor_name, (), {})()
    model = MultiModalModel(placeholders={"image": 1, "video": 2})
    return kind(processor, model, HFConfig({}, str(folder / "config.json"))).frame_defaults()


def test_the_settings_of_a_folder_name_frames(tmp_path: Path) -> None:
    found = frames_of(Qwen3Items, "Qwen3VLProcessor", tmp_path)
    assert found == FrameDefaults(fps=2.0, fewest=4, most=768)
    found = frames_of(Qwen3Items, "Qwen3VLProcessor", tmp_path, fps=1, max_frames=20, min_frames=2)
    assert found == FrameDefaults(fps=1, fewest=2, most=20)
    found = frames_of(GlmItems, "Glm4vProcessor", tmp_path, num_frames=16, fps=3)
    assert (found.num_frames, found.fps, found.placement) == (None, 3, "starts")
    found = frames_of(GlmItems, "Glm46VProcessor", tmp_path, fps=3)
    assert [found.count(int(30 * seconds), 30.0) for seconds in (10, 100, 400, 3000)] == [60, 200, 400, 640]


def test_sizes_of_frames_of_smolvlm(tmp_path: Path) -> None:
    assert proportional_size(480, 640, 512) == (384, 512)
    assert proportional_size(101, 50, 99) == (99, 50)
    assert proportional_size(3, 1000, 300) == (1, 300)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"max_image_size": {"longest_edge": 8}, "video_sampling": {"fps": 1, "max_frames": 64, "video_size": '
        '{"longest_edge": 32}}}'
    )
    frames = TwiceResizedFrames.from_config(str(tmp_path / "config.json"), TwiceResizedRules())
    assert (frames.fps, frames.num_frames) == (1, 64)
    found = frames([np.zeros((2, 10, 20, 3), np.uint8)])
    assert found["pixel_values"].shape == (1, 2, 3, 8, 8)


def test_wrong_sizes_of_frames_are_refused() -> None:
    video = np.zeros((1, 4, 4, 3), np.uint8)
    with pytest.raises(ModelError, match="here: the size of videos should be a height and a width in pixels"):
        SquareFrames({"size": {"shortest_edge": 4}}, SquareRules(), "here")([video])
    with pytest.raises(ModelError, match="should be 'max_image_size' with a 'longest_edge' in pixels"):
        TwiceResizedFrames({"max_image_size": {"longest_edge": -1}}, TwiceResizedRules(), "here")([video])


def test_settings_of_a_request_come_before_those_of_the_folder() -> None:
    video = np.full((1, 4, 4, 3), 51, np.uint8)
    frames = SquareFrames({"size": {"height": 2, "width": 3}, "image_mean": None}, SquareRules(mean=(0, 0, 0)), "here")
    found = frames([video], do_normalize=False, rescale_factor=0.5)["pixel_values_videos"]
    assert found.shape == (1, 1, 3, 2, 3) and np.allclose(found, 25.5)
    assert np.allclose(frames([video], image_std=[0.1, 0.2, 0.4])["pixel_values_videos"][0, 0, :, 0, 0], [2, 1, 0.5])
    assert frames([video], do_resize=False)["pixel_values_videos"].shape == (1, 1, 3, 4, 4)


def test_videos_are_refused_where_nothing_prepares_frames() -> None:
    processor = type("Processor", (), {})()
    model = MultiModalModel(placeholders={"image": 1, "video": 2})
    family = ItemFamily(processor, model, HFConfig({}, "config.json"))
    with pytest.raises(RequestError, match="Videos need the package torchvision for this model"):
        family.process("video", draw_video(1, 1.0), {})


def test_a_template_without_videos_gets_the_placeholder_of_the_family(tmp_path: Path) -> None:
    content = [{"type": "text", "text": "What?"}, {"type": "video"}]
    template = "{% if line['type'] == 'image' %}<image>{% endif %}"
    make_checkpoint("smolvlm", tmp_path)
    model = read_config(tmp_path).multimodal
    assert model is not None
    assert places_to_text(content, template, model.written_as) == "What?\n<video>"
