"""What multimodal models take beside text, as read from config.json; and the language model's part of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from mvllm.config.families import core_model_types, find_model_type, multimodal_model
from mvllm.config.hf_config import HFConfig
from mvllm.config.model_builder import build_model_config, load_hf_config
from mvllm.errors import ModelError

SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
VISION = {"model_type": "clip_vision_model", "image_size": 24, "patch_size": 8}


def write(folder: Path, architecture: str, model_type: str, **values: Any) -> Path:
    config = {"architectures": [architecture], "model_type": model_type, **values}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def build(folder: Path) -> Any:
    return build_model_config(model=str(folder), folder=folder, tokenizer=None)


def _text_defaults() -> dict[str, Any]:
    found = {name: find_model_type({"model_type": name}) for name in core_model_types()}
    return {name: each.text_defaults for name, each in found.items() if each.text_defaults and not each.text_type}


TEXT_DEFAULTS = _text_defaults()


@pytest.mark.parametrize("model_type", TEXT_DEFAULTS)
def test_what_a_text_config_leaves_out_is_transformers_default(model_type: str) -> None:
    theirs = AutoConfig.for_model(model_type)
    assert TEXT_DEFAULTS[model_type] == {key: getattr(theirs, key) for key in TEXT_DEFAULTS[model_type]}


def test_a_published_llava_config_names_only_what_differs(tmp_path: Path) -> None:
    text = {"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    write(
        tmp_path,
        "LlavaForConditionalGeneration",
        "llava",
        text_config=text,
        vision_config={"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
        image_token_index=32000,
    )
    config = build(tmp_path)
    assert (config.num_layers, config.hidden_size, config.max_model_len) == (32, 4096, 4096)
    assert config.architecture == "LlavaForConditionalGeneration"
    assert config.language_architecture == "LlamaForCausalLM"
    assert config.multimodal is not None
    assert config.multimodal.placeholders == {"image": 32000}
    assert config.multimodal.embedding_width == 4096
    assert config.multimodal.max_encoded == 577


@pytest.mark.parametrize(("outer", "inner", "tied"), [(False, True, True), (None, True, True), (False, False, False)])
def test_the_head_of_llava_is_tied_if_either_part_says_so(
    outer: bool | None, inner: bool, tied: bool, tmp_path: Path
) -> None:
    text = {"model_type": "qwen2", **SIZES, "tie_word_embeddings": inner}
    values = {} if outer is None else {"tie_word_embeddings": outer}
    write(tmp_path, "LlavaForConditionalGeneration", "llava", text_config=text, vision_config=VISION, **values)
    assert load_hf_config(tmp_path).get("tie_word_embeddings", False) is tied


@pytest.mark.parametrize("vision", [None, {}])
def test_a_checkpoint_without_vision_config_is_its_text_model(vision: object, tmp_path: Path) -> None:
    text = {"model_type": "mistral", **SIZES}
    write(tmp_path, "Mistral3ForConditionalGeneration", "mistral3", text_config=text, vision_config=vision)
    config = build(tmp_path)
    assert config.architecture == "MistralForCausalLM"
    assert config.multimodal is None
    assert config.language_architecture == ""


@pytest.mark.parametrize(("both_ways", "expected"), [("vision", True), (None, False)])
def test_some_gemma_4_models_attend_in_both_directions(both_ways: str | None, expected: bool) -> None:
    values = {"vision_config": {"hidden_size": 8}, "hidden_size": 64, "use_bidirectional_attention": both_ways}
    found = multimodal_model("Gemma4ForConditionalGeneration", HFConfig(values, "config.json"))
    assert found is not None
    assert found.spans_attend_both_ways is expected


def test_a_placeholder_that_is_no_token_id_is_refused() -> None:
    values = {"vision_config": VISION, "hidden_size": 64, "image_token_index": "<image>"}
    with pytest.raises(ModelError, match="'image_token_index' should be a token id, found '<image>'"):
        multimodal_model("LlavaForConditionalGeneration", HFConfig(values, "config.json"))
