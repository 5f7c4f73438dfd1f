"""What configs of families that generate images declare, and what is malformed."""

from __future__ import annotations

import pytest

from mvllm.config.hf_config import HFConfig
from mvllm.config.model_builder import build_model_config
from mvllm.errors import ModelError
from mvllm_image_generation.formats import JANUS_MULTIPLIERS, channel_multipliers, image_space, janus_spaces
from tests.unit.config.folders import LLAMA, write_folder

VOCAB_SIZE = LLAMA["vocab_size"]


@pytest.mark.parametrize(
    ("config", "generation", "message"),
    [
        ({"vq_config": "x"}, {}, "config.json: 'vq_config' should be a JSON object, found 'x'"),
        ({}, {"generation_kwargs": 5}, "generation_config.json: 'generation_kwargs' should be a JSON object, found 5"),
        ({}, {"generation_kwargs": {"boi_token_id": 10}}, "'boi_token_id' should be a token id below 10, found 10"),
    ],
)
def test_malformed_configs_of_janus_are_refused(config, generation, message):
    with pytest.raises(ModelError, match=message):
        janus_spaces(HFConfig(config, "config.json"), 10, HFConfig(generation, "generation_config.json"))


JANUS = {
    "model_type": "janus",
    "architectures": ["JanusForConditionalGeneration"],
    "vq_config": {"num_embeddings": 16},
    "text_config": {**LLAMA},
}


@pytest.mark.parametrize(
    "declared",
    [{}, {"sound": {"first": VOCAB_SIZE, "size": 16}}, {"image": {"first": VOCAB_SIZE, "size": 8}}],
    ids=["none", "another", "another size"],
)
def test_a_family_of_images_declares_its_space_or_leaves_it_out(tmp_path, declared):
    write_folder(tmp_path, {**LLAMA, **JANUS}, token_spaces=declared)
    expected = f"has the space 'image' with first={VOCAB_SIZE}, size=16 and has_own_head=True"
    with pytest.raises(ModelError, match=expected):
        build_model_config(model="m", folder=tmp_path, tokenizer=None)
    write_folder(tmp_path, {**LLAMA, **JANUS}, token_spaces={"image": {"first": VOCAB_SIZE, "size": 16}})
    assert list(build_model_config(model="m", folder=tmp_path, tokenizer=None).token_spaces) == ["image"]


def test_another_architecture_with_the_classes_of_janus_is_told_what_it_needs(tmp_path):
    write_folder(tmp_path, LLAMA)
    with pytest.raises(ModelError, match=r"needs the token space 'image', found \[\]. Declare it with 'token_spaces'"):
        image_space(build_model_config(model="m", folder=tmp_path, tokenizer=None))


@pytest.mark.parametrize("found", [3, "1, 2", [1, 0], [1, "2"]], ids=str)
def test_malformed_multipliers_of_a_pixel_decoder_are_refused(found):
    with pytest.raises(ModelError, match="'channel_multiplier' should be a list of integers above 0, found "):
        channel_multipliers(HFConfig({"channel_multiplier": found}, "config.json: 'vq_config'"), JANUS_MULTIPLIERS)


@pytest.mark.parametrize("kind", ["janus", "emu3"])
@pytest.mark.parametrize("text", [{}, {"text_config": {}}, {"text_config": {"num_hidden_layers": 3}}])
def test_a_config_of_defaults_without_architectures_is_that_of_its_family(tmp_path, kind, text):
    codes = {f"<|visual token {code:06d}|>": 7 + code for code in range(5)}
    write_folder(tmp_path, {"model_type": kind, "vocabulary_map": codes, **text})
    config = build_model_config(model="m", folder=tmp_path, tokenizer=None)
    assert config.architecture.lower() == f"{kind}forconditionalgeneration"
    assert list(config.token_spaces) == ["image"]
