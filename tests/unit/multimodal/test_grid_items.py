"""Three-dimensional positions and frames of Qwen-VL and GLM-4V: prompts with images and videos as in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import ModelError, RequestError
from mvllm.messages.multimodal import MultiModalItem
from mvllm.multimodal.contents import VideoContent
from mvllm.multimodal.item_families.frames import video_settings
from mvllm.multimodal.item_families.grid_frames import GridFrames, GridRules
from mvllm.multimodal.item_families.grids import GridItems, positions_over_span
from mvllm.multimodal.item_processor import ItemProcessor
from tests.helpers.multimodal_suite import draw_image
from tests.helpers.multimodal_zoo import load_reference, make_checkpoint
from tests.helpers.paged_driver import read_config
from tests.helpers.processed_items import as_arrays, process_prompt
from tests.helpers.zoo_grids import GRIDS

ENTRIES = [
    pytest.param(name, marks=[] if entry.gate else [pytest.mark.exhaustive], id=name)
    for name, entry in GRIDS.items()
    if "-" not in name
]


def draw_video(size: tuple[int, int], count: int, fps: float = 8.0) -> VideoContent:
    frames = np.stack([np.asarray(draw_image(size, seed)) for seed in range(count)])
    return VideoContent(frames, fps, list(range(count)), count, count / fps)


def make_processor(folder: Path) -> ItemProcessor:
    config = read_config(folder)
    assert config.multimodal is not None
    return ItemProcessor(folder, config.architecture, config.multimodal, config.hf_config)


def positions_of(num_tokens: int, items: Sequence[MultiModalItem]) -> np.ndarray[Any, Any]:
    """[3, num_tokens] and the position of the next token as a last column."""
    parts: list[np.ndarray[Any, Any]] = []
    at, position = 0, 0
    for item in items:
        span = item.span
        assert span.rope_positions is not None and span.rope_length is not None
        own = np.frombuffer(span.rope_positions.data, np.int32).reshape(span.rope_positions.shape)
        parts.append(np.tile(np.arange(position, position + span.offset - at), (3, 1)))
        position += span.offset - at
        parts.append(position + own)
        position += span.rope_length
        at = span.stop
    parts.append(np.tile(np.arange(position, position + num_tokens - at + 1), (3, 1)))
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("name", ENTRIES)
def test_positions_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path)
    reference, processor = load_reference(folder), make_processor(folder)
    family = processor.family
    image, video = family.placeholder("image"), family.placeholder("video")
    if "glm" in name:
        video = f"<|begin_of_video|>{video}<|end_of_video|>"
    images = [draw_image((40, 24), 1), draw_image((19, 50), 2), draw_image((64, 64), 3)]
    prompt = f"a{image}bc{image}{video}some words{video}{image}"
    videos = [draw_video((60, 20), 6), draw_video((24, 33), 3)]
    contents: list[tuple[str, Any]] = [("image", each) for each in images] + [("video", each) for each in videos]
    counts = {"image": 3, "video": 2}
    processed = [processor.process(modality, content, counts=counts) for modality, content in contents]
    ids, items = process_prompt(prompt, processed, processor.token_ids)
    assert [item.modality for item in items] == ["image", "image", "video", "video", "image"]

    arrays = [as_arrays(item.features) for item in processed]
    names = ("image_grid_thw", "video_grid_thw")
    grids = {key: torch.tensor(np.concatenate([each[key] for each in arrays if key in each])) for key in names}
    if name == "qwen2_5_vl":
        grids["second_per_grid_ts"] = torch.tensor([2 / 8.0, 2 / 8.0])
    types = torch.tensor(processor.processor.create_mm_token_type_ids([ids]))
    wanted, delta = reference.model.get_rope_index(torch.tensor([ids]), mm_token_type_ids=types, **grids)
    found = positions_of(len(ids), items)
    assert np.array_equal(found[:, :-1], wanted[:, 0].numpy())
    assert found[0, -1] == len(ids) + int(delta)


def test_text_behind_a_long_video_has_larger_positions_than_the_video() -> None:
    """Unlike in some versions of transformers, where the positions of the text repeat those of the video."""
    positions, advance = positions_over_span([(0, 8)], (4, 1, 2), 2.5)
    assert positions.tolist() == [[0, 0, 2, 2, 5, 5, 7, 7], [0] * 8, [0, 1] * 4]
    assert advance == 8


def test_text_between_frames_has_positions_of_its_own() -> None:
    positions, advance = positions_over_span([(0, 6), (8, 14)], (1, 2, 3))
    assert positions.tolist() == [
        [0, 0, 0, 0, 0, 0, 3, 4, 5, 5, 5, 5, 5, 5],
        [0, 0, 0, 1, 1, 1, 3, 4, 5, 5, 5, 6, 6, 6],
        [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7],
    ]
    assert advance == 8


def test_frames_that_take_more_positions_than_tokens_are_refused(tmp_path: Path) -> None:
    processor = make_processor(make_checkpoint("qwen2_5_vl", tmp_path))
    frames = draw_video((16, 16), 4).frames
    with pytest.raises(RequestError, match="so far apart that they take 61 positions, but only 8 tokens"):
        processor.process("video", VideoContent(frames, 1.0, [0, 10, 20, 30], 40, 40.0), counts={"video": 1})


def test_frames_of_one_image_have_its_patches(tmp_path: Path) -> None:
    processor = make_processor(make_checkpoint("qwen3_vl", tmp_path))
    image = draw_image((33, 20), 5)
    frames = np.stack([np.asarray(image)] * 4)
    of_image = as_arrays(processor.process("image", image, counts={"image": 1}).features)
    video = processor.process("video", VideoContent(frames, 2.0, [0, 1, 2, 3], 4, 2.0), counts={"video": 1})
    of_video = as_arrays(video.features)
    assert of_image["image_grid_thw"].tolist() == [[1, 4, 8]] and of_video["video_grid_thw"].tolist() == [[2, 4, 8]]
    patches = of_video["pixel_values_videos"].reshape(2, 32, -1)
    for each in patches:
        np.testing.assert_allclose(each, of_image["pixel_values"], atol=1e-5)
    assert video.replacement.startswith("<0.2 seconds><|vision_start|><|video_pad|>")
    assert "<|vision_end|><1.2 seconds><|vision_start|>" in video.replacement
    assert [stop - start for start, stop in video.embedded] == [8, 8]
    assert set(of_video) == {"pixel_values_videos", "video_grid_thw"}


def test_sizes_of_frames_are_those_of_transformers() -> None:
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as of_whole
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_frame

    rng = np.random.default_rng(0)
    for _ in range(300):
        count, height, width = (int(rng.integers(a, b)) for a, b in ((2, 40), (30, 900), (30, 900)))
        limits = int(rng.integers(1000, 50_000)), int(rng.integers(60_000, 900_000))
        bounds = {"min_pixels": limits[0], "max_pixels": limits[1]}
        frames = GridFrames({}, GridRules(smallest=limits[0], largest=limits[1]), "here")
        assert frames.frame_size(count, height, width) == of_frame(height, width, 28, **bounds)
        whole = GridFrames({}, GridRules(smallest=limits[0], largest=limits[1], of_whole_video=True), "here")
        assert whole.frame_size(count, height, width) == of_whole(count, height, width, 2, 28, **bounds)


def test_elongated_frames_and_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="too elongated"):
        GridFrames({}, GridRules(smallest=100, largest=10_000), "here").frame_size(2, 10, 2100)
    wrong = GridFrames({"size": {"shortest_edge": "much"}}, GridRules(smallest=100, largest=10_000), "here")
    with pytest.raises(ModelError, match="here: the size of videos should be two numbers of pixels"):
        wrong.frame_size(2, 100, 100)


def test_a_video_processor_of_transformers_is_kept(tmp_path: Path) -> None:
    class Processor:
        video_processor = "of torchvision"

    config, model = HFConfig({}, str(tmp_path / "config.json")), MultiModalModel(placeholders={"video": 1})
    assert GridItems(Processor(), model, config).processor.video_processor == "of torchvision"


def test_settings_of_videos_are_read_from_the_folder(tmp_path: Path) -> None:
    """In transformers' order; those of images come last."""
    config = str(tmp_path / "config.json")
    for name, text in (
        ("processor_config.json", '{"image_processor": {"patch_size": 3}}'),
        ("preprocessor_config.json", '{"patch_size": 4}'),
        ("video_preprocessor_config.json", '{"patch_size": 5, "merge_size": 1, "fps": 3, "num_frames": null}'),
    ):
        (tmp_path / name).write_text(text)
        found = GridFrames.from_config(config, GridRules())
        assert f'"patch_size": {found.patch_size}' in text
    assert (found.merge_size, found.temporal_patch_size, found.fps, found.num_frames) == (1, 2, 3, None)
    (tmp_path / "processor_config.json").write_text('{"video_processor": {"patch_size": 6}}')
    assert video_settings(config) == ({"patch_size": 6}, str(tmp_path / "processor_config.json"))
