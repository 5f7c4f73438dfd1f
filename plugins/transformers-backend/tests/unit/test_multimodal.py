"""What the transformers backend does with models that take more than text, before any weight is read."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import ConfigError, ModelError
from mvllm.models.registry import resolve_model_class
from mvllm.models.weight_update import UnallocatedContext
from mvllm_transformers_backend.encoders import TransformersEncoders
from mvllm_transformers_backend.multimodal import TransformersMultiModalForCausalLM
from mvllm_transformers_backend.replacement_modules import LanguageModelStub
from mvllm_transformers_backend.supported_classes import unsupported_reason
from tests.helpers.multimodal_zoo import FIRST_SPECIAL_ID, TEXT, make_checkpoint, save_model, zoo
from tests.helpers.paged_driver import load_model, make_context, read_config
from tests.helpers.thread_ranks import fake_group

TRANSFORMERS = importlib.import_module("plugins.transformers-backend.tests.multimodal_zoo").TRANSFORMERS
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GRID_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64}


def save_config(folder: Path, config: Any, architecture: str) -> Path:
    """A model folder without weights."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises((ModelError, ConfigError)) as caught:
        load_model(folder, model_impl="transformers", **settings)
    return str(caught.value)


def paligemma() -> Any:
    return transformers.PaliGemmaConfig(
        text_config=transformers.GemmaConfig(**{**TEXT, "head_dim": 16, "pad_token_id": 0}),
        vision_config=transformers.SiglipVisionConfig(**_VISION, image_size=24, patch_size=8),
        image_token_index=FIRST_SPECIAL_ID,
        projection_dim=64,
    )


def glm_ocr() -> Any:
    return transformers.GlmOcrConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
        vision_config=_GRID_TOWER,
        image_token_id=FIRST_SPECIAL_ID,
    )


@pytest.mark.parametrize(
    ("make", "architecture", "reason", "remedy"),
    [
        (
            zoo()["qwen3_vl"].config,
            "Qwen3VLForConditionalGeneration",
            "more than embeddings (deepstack_visual",
            "model_impl='auto'",
        ),
        (paligemma, "PaliGemmaForConditionalGeneration", "attention masks of its own", "supported natively"),
        (glm_ocr, "GlmOcrForConditionalGeneration", "positions of its own", "supported natively"),
    ],
)
def test_models_that_need_more_than_merged_embeddings_are_refused(
    make: Any, architecture: str, reason: str, remedy: str, tmp_path: Path
) -> None:
    text = refusal(save_config(tmp_path, make(), architecture))
    assert reason in text and remedy in text
    if architecture.startswith("Qwen3VL"):  # which gives more with items only
        config = read_config(tmp_path, model_impl="transformers", language_model_only=True)
        assert TransformersMultiModalForCausalLM(config, make_context()).item_encoder is None


def test_stages_are_refused(tmp_path: Path) -> None:
    folder = save_config(tmp_path, TRANSFORMERS["llava_next-through"].config(), "LlavaNextForConditionalGeneration")
    assert "not cut into stages here. Use pipeline_parallel_size=1" in refusal(
        folder, ctx=make_context(pp=fake_group("pp", 0, 2))
    )


def test_text_alone_needs_no_encoders(tmp_path: Path) -> None:
    save_model(TRANSFORMERS["llava_next-through"].config(), tmp_path)
    config = read_config(tmp_path, language_model_only=True)
    assert config.multimodal is None
    kind = resolve_model_class(config.architecture, config.model_impl)
    assert kind is TransformersMultiModalForCausalLM
    model = kind(config, make_context())
    assert model.item_encoder is None
    names = {
        model.given_name(f"{name}.weight") for name in ("vision_tower.post_layernorm", "language_model.model.norm")
    }
    assert {name for name in names if model.ignores(name)} == {"model.vision_tower.post_layernorm.weight"}
    assert "model.language_model.norm.weight" in model.weight_targets()


def test_values_that_a_config_leaves_out_are_those_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlavaNextForConditionalGeneration"],
                "model_type": "llava_next",
                "text_config": {"model_type": "mistral", "num_hidden_layers": 2},
            }
        )
    )
    config = read_config(tmp_path, max_model_len=64, hf_overrides={"num_hidden_layers": 3})
    assert config.multimodal == MultiModalModel({"image": 32_000}, embedding_width=4096, by_transformers=True)
    assert (config.hidden_size, config.num_layers, config.num_kv_heads, config.vocab_size) == (4096, 3, 8, 32_000)


def test_the_empty_model_of_a_weight_update_has_encoders_without_memory(tmp_path: Path) -> None:
    folder = make_checkpoint("llava", tmp_path)
    config = read_config(folder, model_impl="transformers")
    model = TransformersMultiModalForCausalLM(config, UnallocatedContext.of(make_context()))
    assert model.item_encoder is not None
    assert not any(p.untyped_storage().nbytes() for p in model.item_encoder.parameters())


class _FailsLate(torch.nn.Module):
    """A model of encoders and language model that fails behind the latter."""

    def __init__(self, stub: LanguageModelStub) -> None:
        super().__init__()
        self.language_model = stub

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool, pixel_values: torch.Tensor
    ) -> None:
        self.language_model(inputs_embeds=self.language_model.embed_tokens(input_ids) + pixel_values)
        raise ValueError("late")


def test_an_encoder_that_fails_keeps_no_tensors() -> None:
    stub = LanguageModelStub(4, torch.float32)
    encoders = TransformersEncoders(_FailsLate(stub), stub, {"image": 1})
    with pytest.raises(ValueError, match="late"):
        encoders.encode("image", [{"input_ids": torch.ones(3, dtype=torch.int64), "pixel_values": torch.ones(4)}])
    assert not stub.arguments and stub.embed_tokens.result is None


def test_attention_to_encoders_is_refused(tmp_path: Path) -> None:
    assert "a decoder that attends to it" in str(unsupported_reason("T5Gemma2ForConditionalGeneration"))
    text = {**TEXT, "pad_token_id": 0, "cross_attention_layers": [1], "rope_parameters": {"rope_theta": 1e4}}
    config = transformers.MllamaConfig(text_config=text, vision_config={"image_size": 28})
    assert "is not supported" in refusal(save_config(tmp_path, config, "MllamaForConditionalGeneration"))


def test_a_forced_model_has_transformers_encoders(tmp_path: Path) -> None:
    folder = make_checkpoint("llava", tmp_path)
    assert not read_config(folder).multimodal.by_transformers  # type: ignore[union-attr]
    assert read_config(folder, model_impl="transformers").multimodal.by_transformers  # type: ignore[union-attr]
