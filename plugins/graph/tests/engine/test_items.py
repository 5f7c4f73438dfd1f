"""Images and embeddings for models that run as graphs: the encoder runs on the host, its rows enter the graph."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from plugins.graph.tests.interpreter_platform import InterpreterPlatform, graph_platform_path

from mvllm import SamplingParams
from mvllm.errors import RequestError
from mvllm.models.vision.grid_tower import GridTower
from mvllm.plugin_api import Capabilities, ShapePolicy
from tests.helpers import multimodal_suite, parity
from tests.helpers.audio_suite import audio_oracle
from tests.helpers.changed_weights import changed_copy
from tests.helpers.model_zoo import load_reference
from tests.helpers.multimodal_suite import MultiModalSuite, check, generate, names_of, oracle
from tests.helpers.plugins import prepend

engine = partial(multimodal_suite.engine, platform="graph-interpreter")
FEW = ("llava", "qwen2_vl", "qwen3_vl", "internvl", "mistral3")
"""Rows of plain embeddings, three-dimensional positions, DeepStack, tiles, rows of any number."""
OTHERS = ("qwen2_5_vl", "glm4v", "idefics3", "lfm2_vl", "llava_onevision", "qwen3_vl_moe")


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepend(monkeypatch, graph_platform_path(tmp_path))
    monkeypatch.setattr(multimodal_suite, "engine", engine)


def test_images_with_deepstack_and_text_in_one_batch() -> None:
    expected = oracle("qwen3_vl")
    with engine(expected.folder, max_num_batched_tokens=24) as llm:
        check(expected, generate(llm, expected.requests[:3], num_tokens=12))


@pytest.mark.exhaustive
class TestAsGraphs(MultiModalSuite):
    names = names_of(*FEW)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str) -> None:
    expected = oracle(name)
    with engine(expected.folder) as llm:
        check(expected, generate(llm, expected.requests))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen2_audio", "voxtral"])
def test_sounds(name: str) -> None:
    expected = audio_oracle(name)
    length = max(map(len, map(expected.prompt_ids, expected.requests))) + multimodal_suite.NUM_TOKENS
    with engine(expected.folder, max_model_len=max(length, multimodal_suite.MAX_LEN)) as llm:
        check(expected, generate(llm, expected.requests[:5]))


@pytest.mark.exhaustive
def test_an_encoder_that_fails_fails_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = oracle("qwen3_vl")

    def fail(*args: object) -> list[torch.Tensor]:
        raise ValueError("the picture is empty")

    with engine(expected.folder) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(GridTower, "encode", fail)
            text, image = generate(llm, expected.requests[:2])
        check(expected, [text])
        assert image.outputs[0].finish_reason == "error" and "the picture is empty" in (image.outputs[0].error or "")
        check(expected, generate(llm, expected.requests[:3]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
@pytest.mark.parametrize("is_static", [False, True])
def test_steps_and_rows_are_padded(name: str, is_static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ShapePolicy(tokens=(8, 32, 128), requests=(2, 8), pages=(4, 32))
    able = vars(InterpreterPlatform)["capabilities"].fget

    def capabilities(platform: InterpreterPlatform) -> Capabilities:
        found: Capabilities = able(platform)
        return replace(found, static_shapes=is_static)

    monkeypatch.setattr(InterpreterPlatform, "shapes", lambda platform: shapes)
    monkeypatch.setattr(InterpreterPlatform, "capabilities", property(capabilities))
    expected = oracle(name)
    with engine(expected.folder, max_num_batched_tokens=100) as llm:
        check(expected, generate(llm, expected.requests))


@pytest.mark.exhaustive
def test_encoders_are_loaded_again_after_a_deep_sleep() -> None:
    expected = oracle("llava")
    with engine(expected.folder) as llm:
        check(expected, generate(llm, expected.requests[:2]))
        llm.sleep(level=2)
        llm.wake_up()
        check(expected, generate(llm, expected.requests[:3]))


@pytest.mark.exhaustive
def test_updated_weights_are_those_of_encoders_as_well(tmp_path: Path) -> None:
    expected = oracle("qwen3_vl")
    changed = changed_copy(expected.folder, tmp_path / "changed")
    with engine(changed) as llm:
        new = [output.outputs[0].token_ids for output in generate(llm, expected.requests[:3])]
    with engine(expected.folder) as llm:
        check(expected, generate(llm, expected.requests[:3]))
        llm.update_weights(path=changed)
        assert [output.outputs[0].token_ids for output in generate(llm, expected.requests[:3])] == new
        llm.update_weights(path=expected.folder)
        check(expected, generate(llm, expected.requests[:3]))


@pytest.mark.parametrize(
    "name", ["llama-gqa", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gpt2", "falcon-new"))]
)
def test_ready_embeddings(name: str) -> None:
    expected = parity.oracle(name, (3, 8), 12)
    embedding = load_reference(expected.folder).get_input_embeddings()
    rows = [embedding(torch.tensor(prompt)).detach() for prompt in expected.prompts]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    settings = {"platform": "graph-interpreter", "enable_prompt_embeds": True, "max_num_batched_tokens": 24}
    with parity.engine(expected.folder, **settings) as llm:
        prompts = [{"prompt_embeds": rows[0]}, {"prompt_token_ids": expected.prompts[1]}, {"prompt_embeds": rows[1]}]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [expected.tokens[0], expected.tokens[1], expected.tokens[1]]


@pytest.mark.exhaustive
def test_images_that_see_later_tokens_are_refused_and_text_is_not() -> None:
    expected = oracle(names_of("gemma3")[0])
    with engine(expected.folder) as llm:
        check(expected, generate(llm, expected.requests[:1]))
        with pytest.raises(RequestError, match="whose attention is causal"):
            generate(llm, expected.requests[1:2])
