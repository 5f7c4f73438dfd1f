"""ColQwen2's config.json: the model below the projection, its vectors, and the positions of its images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mvllm.config.model_builder import build_model_config
from mvllm.config.pooler_config import PoolerConfig
from mvllm.errors import ModelError, RequestError
from mvllm.messages.pooling_params import PoolingParams, PoolingType

TEXT = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]},
}
_IDS = {"image_token_id": 5, "video_token_id": 6}
VLM = {"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {"depth": 2}, **_IDS}


def build(folder: Path, vlm: object, *, pooler: dict[str, Any] | None = None, **values: Any) -> Any:
    config = {"architectures": ["ColQwen2ForRetrieval"], "model_type": "colqwen2", "dtype": "bfloat16", **values}
    (folder / "config.json").write_text(json.dumps({**config, "vlm_config": vlm}))
    return build_model_config(model="it", folder=folder, tokenizer=None, pooler_config=pooler)


NESTED = {**VLM, "model_type": "qwen2_vl", "dtype": "float32", "text_config": {**TEXT, "model_type": "qwen2_vl_text"}}
FLAT = {**VLM, "model_type": "qwen2_vl", **TEXT, "sliding_window": 9}


@pytest.mark.parametrize("vlm", [NESTED, FLAT])
def test_the_config_below_the_projection_is_the_models(vlm: dict[str, Any], tmp_path: Path) -> None:
    config = build(tmp_path, vlm)
    assert (config.architecture, config.checkpoint_dtype) == ("ColQwen2ForRetrieval", "bfloat16")
    assert (config.num_layers, config.sliding_window, config.kind.generates) == (2, None, False)
    assert config.kind.token_vector_size == 128
    assert config.multimodal.placeholders == {"image": 5} and config.multimodal.rope_sections is None
    pooler = PoolerConfig.from_model(config)
    assert (pooler.pooling_type, pooler.normalize, pooler.max_dimensions) == (PoolingType.ALL, True, 128)
    assert pooler.resolve_params(PoolingParams()).pooling_type is PoolingType.ALL
    for params in ({"task": "embed"}, {"pooling_type": "mean"}):
        with pytest.raises(RequestError, match="a vector for each token, and none for a whole prompt"):
            pooler.resolve_params(PoolingParams(**params))


def test_the_positions_of_images_may_be_those_of_the_grid(tmp_path: Path) -> None:
    assert build(tmp_path, NESTED, image_positions="grid").multimodal.rope_sections == (2, 3, 3)
    with pytest.raises(ModelError, match="'image_positions' should be 'sequence' or 'grid', found 'rows'"):
        build(tmp_path, NESTED, image_positions="rows")


@pytest.mark.parametrize(
    ("vlm", "message"),
    [
        ({**NESTED, "text_config": {**TEXT, "model_type": "llama"}}, "should be a qwen2_vl, found 'llama'"),
        ("it", "'vlm_config' should be an object"),
    ],
)
def test_another_model_below_the_projection_is_refused(vlm: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        build(tmp_path, vlm)


def test_the_users_pooling_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="so pooler_config takes no pooling_type"):
        PoolerConfig.from_model(build(tmp_path, NESTED, pooler={"pooling_type": "mean"}))
