"""Qwen-VL and GLM-4V in the engine give the tokens of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mvllm import SamplingParams
from mvllm.multimodal.contents import VideoContent
from mvllm.multimodal.item_processor import ItemProcessor, as_arrays
from mvllm.multimodal.prompt_expansion import process_prompt
from tests.helpers.multimodal_suite import (
    NUM_TOKENS,
    MultiModalOracle,
    MultiModalSuite,
    check,
    draw_image,
    engine,
    generate,
    names_of,
    oracle,
)
from tests.helpers.paged_driver import read_config

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v", "glm4v_moe")


@pytest.mark.shows("tokens")
@pytest.mark.parametrize("name", names_of(*FAMILIES, gate=True))
def test_requests_with_images_and_without_in_one_batch(name: str) -> None:
    expected = oracle(name)
    with engine(expected.folder) as llm:
        check(expected, generate(llm, expected.requests[:3], num_tokens=16))


FPS = 8.0
VIDEO = dict.fromkeys(("glm4v", "glm46v", "glm4v_moe"), "<|begin_of_video|><|video|><|end_of_video|>")


def draw_video(size: tuple[int, int], count: int) -> np.ndarray[Any, Any]:
    """uint8 [count, height, width, 3]."""
    return np.stack([np.asarray(draw_image(size, 20 + i)) for i in range(count)])


def inputs_of(expected: MultiModalOracle, prompt: str, contents: list[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    """Arguments of transformers' model, with features from the engine's processor: transformers' needs torchvision."""
    config = read_config(expected.folder)
    assert config.multimodal is not None
    processor = ItemProcessor(expected.folder, config.architecture, config.multimodal, config.hf_config)
    counts = {modality: sum(each == modality for each, _ in contents) for modality, _ in contents}
    items = [processor.process(modality, content, counts=counts) for modality, content in contents]
    ids, _ = process_prompt(prompt, items, processor.token_ids)
    features: dict[str, list[np.ndarray[Any, Any]]] = {}
    for item in items:
        for key, value in as_arrays(item.features).items():
            features.setdefault(key, []).append(value)
    inputs = {key: torch.tensor(np.concatenate(values)) for key, values in features.items()}
    inputs["input_ids"] = torch.tensor([ids])
    inputs["mm_token_type_ids"] = torch.tensor(processor.processor.create_mm_token_type_ids([ids]))
    if expected.name == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([2 / FPS] * counts["video"])
    return inputs


@torch.inference_mode()
def check_greedy(expected: MultiModalOracle, inputs: dict[str, torch.Tensor], tokens: list[int]) -> None:
    """Fails unless each token has the largest logit behind the prompt and those before it."""
    rest = torch.tensor([tokens[:-1]])
    ids = torch.cat((inputs["input_ids"], rest), dim=1)
    types = torch.cat((inputs["mm_token_type_ids"], torch.zeros_like(rest)), dim=1)
    inputs = {**inputs, "input_ids": ids, "mm_token_type_ids": types, "attention_mask": torch.ones_like(ids)}
    best = expected.model(**inputs).logits[0, -len(tokens) :].topk(2, dim=-1)
    assert tokens == best.indices[:, 0].tolist()
    assert float((best.values[:, 0] - best.values[:, 1]).min()) > 1e-4, "a tie: choose another video"


@pytest.mark.exhaustive
@pytest.mark.parametrize("budget", [512, 11])
@pytest.mark.parametrize("name", FAMILIES)
def test_videos_and_images_in_one_prompt(name: str, budget: int) -> None:
    expected = oracle(name)
    image, frames = draw_image((40, 24), 3), [draw_video((60, 20), 6), draw_video((24, 33), 3)]
    video = VIDEO.get(name, "<|vision_start|><|video_pad|><|vision_end|>")
    prompts = [f"some {video} words{video}end"]
    contents: list[list[tuple[str, Any]]] = [[("video", each) for each in frames]]
    if name not in VIDEO:  # transformers' GLM-4V takes either images or videos
        prompts.append(f"a{expected.entry.placeholder}b{video}c")
        contents.append([("image", image), ("video", frames[0])])
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    given = []
    for prompt, of_prompt in zip(prompts, contents, strict=True):
        data: dict[str, list[Any]] = {}
        for modality, content in of_prompt:
            data.setdefault(modality, []).append((content, {"fps": FPS}) if modality == "video" else content)
        given.append({"prompt": prompt, "multi_modal_data": data})
    with engine(expected.folder, max_num_batched_tokens=budget) as llm:
        outputs = llm.generate(given, params, use_tqdm=False)
    for output, prompt, of_prompt in zip(outputs, prompts, contents, strict=True):
        decoded = [
            (modality, VideoContent(each, FPS, list(range(len(each))), len(each), len(each) / FPS))
            if modality == "video"
            else (modality, each)
            for modality, each in of_prompt
        ]
        inputs = inputs_of(expected, prompt, decoded)
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        check_greedy(expected, inputs, list(output.outputs[0].token_ids))


@pytest.mark.exhaustive
def test_ready_embeddings_are_text_for_a_model_with_deepstack() -> None:
    expected = oracle("qwen3_vl")
    ids = expected.prompt_ids(expected.requests[0])
    embeds = expected.model.get_input_embeddings()(torch.tensor(ids)).detach()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    with engine(expected.folder, enable_prompt_embeds=True) as llm:
        prompts = [{"prompt_embeds": embeds}, expected.requests[1].as_prompt()]
        of_embeds, of_image = llm.generate(prompts, params, use_tqdm=False)
    expected.check(0, of_embeds.outputs[0].token_ids)
    expected.check(1, of_image.outputs[0].token_ids)


@pytest.mark.exhaustive
class TestGrids(MultiModalSuite):
    names = names_of(*FAMILIES)
