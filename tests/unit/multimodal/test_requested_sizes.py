"""Requests cannot make the model's processor compute images that are larger than those it takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mvllm.config.multimodal import MultiModalConfig, MultiModalModel
from mvllm.errors import RequestError
from mvllm.multimodal.contents import AudioContent, VideoContent
from mvllm.multimodal.item_families.grid_frames import GridFrames, GridRules
from mvllm.multimodal.item_processor import ItemProcessor
from mvllm.multimodal.item_request import read_item_request
from mvllm.multimodal.requested_sizes import check_requested_sizes

SIDES = {"shortest_edge": 336}
AREA = SimpleNamespace(shortest_edge=56 * 56, longest_edge=12_845_056)
WIDE = Image.new("RGB", (400, 4))
VIDEO = VideoContent(np.zeros((20, 8, 8, 3), np.uint8), 1.0, [], 20, 20.0)
MOST = 1_000_000


@pytest.mark.parametrize(
    ("kwargs", "content", "default", "fits"),
    [
        ({"size": {"height": 1000, "width": 1000}}, WIDE, SIDES, True),
        ({"size": {"height": 1000, "width": 1001}}, WIDE, SIDES, False),
        ({"images_kwargs": {"pad_size": {"height": 100_000, "width": 100_000}}}, WIDE, SIDES, False),
        ({"size": {"shortest_edge": 90}}, WIDE, SIDES, True),
        ({"size": {"shortest_edge": 110}}, WIDE, SIDES, False),  # the longer side becomes 11,000
        ({"size": 110}, WIDE, SIDES, False),
        ({"size": {"shortest_edge": 110, "longest_edge": 2000}}, WIDE, SIDES, True),
        ({"size": {"longest_edge": 9000}}, WIDE, SIDES, True),
        ({"size": {"longest_edge": 100_000}}, WIDE, SIDES, False),
        ({"size": {"longest_edge": 900_000}}, WIDE, AREA, True),  # pixels of the whole image
        ({"size": {"shortest_edge": 1_100_000, "longest_edge": 2_000_000}}, WIDE, AREA, False),
        ({"size": {"height": 300, "width": 300}}, VIDEO, SIDES, False),
        ({"size": {"height": 200, "width": 200}}, VIDEO, SIDES, True),
        ({"size": {"height": "tall", "width": None}, "do_resize": True}, WIDE, None, True),  # the processor refuses it
        ({"size": [1000, 1001]}, WIDE, SIDES, False),
        ({"size": [1000, 1000], "image_mean": [0.5, 0.5, 0.5]}, WIDE, SIDES, True),
        ({"size": {"max_height": 1000, "max_width": 1001}}, WIDE, SIDES, False),
        ({"images_kwargs": {"max_height": 1000, "max_width": 1001}}, WIDE, SIDES, False),
        ({"min_pixels": 1_000_001}, WIDE, AREA, False),
        ({"min_pixels": 50_001, "max_pixels": 900_000}, VIDEO, AREA, False),
        ({"min_pixels": 50_000, "max_pixels": 900_000}, VIDEO, AREA, True),
        ({"size": 100_000}, AudioContent(np.zeros(3, np.float32), 16000), None, True),
    ],
)
def test_sizes(kwargs: dict[str, Any], content: Any, default: Any, fits: bool) -> None:
    if fits:
        check_requested_sizes(kwargs, content, MOST, default)
        return
    with pytest.raises(RequestError, match=rf"pixels of this (image|video); {MOST} are allowed") as caught:
        check_requested_sizes(kwargs, content, MOST, default)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_frames_without_torchvision_have_a_size_as_processors_of_transformers_do() -> None:
    processor: Any = ItemProcessor.__new__(ItemProcessor)
    processor.processor = SimpleNamespace(video_processor=GridFrames({}, GridRules(), "config.json"))
    asked = {"size": {"shortest_edge": 12_544, "longest_edge": 12_845_056}}
    check_requested_sizes(asked, VIDEO, MOST, processor.default_size("video"))
    processor.processor = SimpleNamespace(video_processor=None, image_processor=SimpleNamespace(size=AREA))
    assert processor.default_size("video") is AREA


@pytest.mark.parametrize("kwargs", [{"max_pixels": 10**12}, {"size": {"longest_edge": -(10**9)}}, {"a": [[1e300]]}])
def test_numbers_beyond_any_use_are_refused_before_anything_is_fetched(kwargs: dict[str, Any]) -> None:
    model: Any = SimpleNamespace(multimodal=MultiModalModel(placeholders={"image": 4}))
    prompt = {"multi_modal_data": {"image": b"x"}, "mm_processor_kwargs": kwargs}
    with pytest.raises(RequestError, match="numbers may be up to 50000000"):
        read_item_request(prompt, model, MultiModalConfig())
