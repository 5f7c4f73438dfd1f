"""Videos in prompts: the engine's greedy tokens are those of transformers' models, in float32.

transformers' video processors need torchvision, so its models get the features of the engine's own processor;
tests/unit/multimodal/test_torchvision.py compares those with transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mvllm import SamplingParams
from mvllm.messages.inputs import TextPrompt
from mvllm.multimodal.contents import VideoContent
from mvllm.multimodal.item_processor import ItemProcessor
from mvllm.multimodal.processed_item import ProcessedItem
from tests.helpers.multimodal_suite import CLEAR, NUM_TOKENS, MultiModalOracle, draw_image, engine, oracle
from tests.helpers.multimodal_zoo import zoo
from tests.helpers.processed_items import as_arrays, process_prompt

FPS = 8.0
MAX_LEN = 1024
NAMES = [name for name, entry in zoo().items() if entry.video_placeholder and entry.modality == "image"]
IMAGES_OR_VIDEOS = ("glm4v", "glm46v", "glm4v_moe")
"""transformers' models of these families take either images or videos."""
EQUAL_LENGTHS = ("llava_onevision",)
"""transformers' models of these families take videos of one length."""


@dataclass(frozen=True)
class VideoRequest:
    """A prompt with images and videos, and its contents in their order."""

    prompt: str
    contents: list[tuple[str, Any]]

    def as_prompt(self) -> TextPrompt:
        """As LLM.generate takes it; all frames are used."""
        data: dict[str, list[Any]] = {}
        for modality, content in self.contents:
            given = (content.frames, {"fps": FPS}) if isinstance(content, VideoContent) else content
            data.setdefault(modality, []).append(given)
        return TextPrompt(prompt=self.prompt, multi_modal_data=data, mm_processor_kwargs={"num_frames": 100})


def draw_video(size: tuple[int, int], count: int, seed: int = 20) -> VideoContent:
    """Frames of random colours."""
    frames = np.stack([np.asarray(draw_image(size, seed + i)) for i in range(count)])
    return VideoContent(frames, FPS, list(range(count)), count, count / FPS)


def draw_requests(expected: MultiModalOracle) -> list[VideoRequest]:
    """Two videos in a prompt, and an image and a video."""
    family, entry = expected.name.split("-")[0], expected.entry
    video, image = entry.video_placeholder, entry.placeholder
    first = draw_video((60, 20), 3 if family == "gemma4" else 6, seed=30 if family == "internvl" else 20)
    second = draw_video((24, 33), len(first.frames) if family in EQUAL_LENGTHS else 3)
    requests = [VideoRequest(f"some {video} words{video}end", [("video", first), ("video", second)])]
    if family not in IMAGES_OR_VIDEOS:
        contents = [("image", draw_image((40, 24), 3)), ("video", first)]
        requests.append(VideoRequest(f"a{image}b{video}c", contents))
    return requests


def inputs_of(expected: MultiModalOracle, request: VideoRequest) -> dict[str, torch.Tensor]:
    """Arguments of transformers' model."""
    config = expected.config
    assert config.multimodal is not None
    processor = ItemProcessor(expected.folder, config.architecture, config.multimodal, config.hf_config)
    counts = {modality: sum(each == modality for each, _ in request.contents) for modality, _ in request.contents}
    items = [processor.process(modality, content, counts=counts) for modality, content in request.contents]
    ids, _ = process_prompt(request.prompt, items, processor.token_ids)
    inputs = features_of(expected, items)
    inputs["input_ids"] = torch.tensor([ids])
    if processor.processor.return_mm_token_type_ids:
        inputs["mm_token_type_ids"] = torch.tensor(processor.processor.create_mm_token_type_ids([ids]))
    videos = [content for modality, content in request.contents if modality == "video"]
    if "qwen2_5_vl" in expected.name:
        inputs["second_per_grid_ts"] = torch.tensor([2 / FPS] * len(videos))
    if "gemma4" in expected.name:
        inputs["num_frames_per_video"] = torch.tensor([len(each.frames) for each in videos])
    return inputs


def features_of(expected: MultiModalOracle, items: list[ProcessedItem]) -> dict[str, torch.Tensor]:
    """The features of all items. Those of SmolVLM follow each other in the second dimension: one batch."""
    found: dict[str, list[np.ndarray[Any, Any]]] = {}
    for item in items:
        for key, value in as_arrays(item.features).items():
            found.setdefault(key, []).append(value)
    axis = 1 if "smolvlm" in expected.name else 0
    return {key: torch.tensor(np.concatenate(values, axis=axis)) for key, values in found.items()}


@torch.inference_mode()
def check_greedy(expected: MultiModalOracle, inputs: dict[str, torch.Tensor], tokens: list[int]) -> None:
    """Fails unless each token has the largest logit behind the prompt and those before it."""
    rest = torch.tensor([tokens[:-1]])
    ids = torch.cat((inputs["input_ids"], rest), dim=1)
    inputs = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.cat((inputs["mm_token_type_ids"], torch.zeros_like(rest)), dim=1)
    best = expected.model(**inputs).logits[0, -len(tokens) :].topk(2, dim=-1)
    assert tokens == best.indices[:, 0].tolist()
    assert float((best.values[:, 0] - best.values[:, 1]).min()) > CLEAR, "a tie: choose another video"


def check_videos(name: str, budget: int, num_tokens: int) -> None:
    expected = oracle(name)
    requests = draw_requests(expected)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    with engine(expected.folder, max_model_len=MAX_LEN, max_num_batched_tokens=budget) as llm:
        first, again = (
            llm.generate([request.as_prompt() for request in requests], params, use_tqdm=False) for _ in range(2)
        )
    for request, *outputs in zip(requests, first, again, strict=True):
        inputs = inputs_of(expected, request)
        for output in outputs:
            assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
        assert outputs[1].num_cached_tokens
        check_greedy(expected, inputs, list(outputs[0].outputs[0].token_ids))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_videos_and_images_in_one_prompt(name: str) -> None:
    check_videos(name, MAX_LEN, NUM_TOKENS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_chunks_that_end_in_a_frame(name: str) -> None:
    """A step holds a whole frame where its positions see each other."""
    check_videos(name, 80 if oracle(name).config.has_non_causal_spans else 11, NUM_TOKENS)


def test_frames_that_attend_both_ways_with_times_between_them() -> None:
    check_videos("gemma4-images", MAX_LEN, 8)
