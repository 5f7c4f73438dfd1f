"""Pooling settings from sentence-transformers' files, in the old and the new format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mvllm.config.model import ModelConfig
from mvllm.config.model_builder import build_model_config
from mvllm.config.pooler_config import PoolerConfig
from mvllm.errors import ModelError, RequestError
from mvllm.messages.pooling_params import Activation, PoolingParams, PoolingTask, PoolingType

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


def model(folder: Path, modules: object = None, pooling: object = None, **config: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return build_model_config(model="it", folder=folder, tokenizer=None)


def test_the_default_is_the_normalized_last_token(tmp_path: Path) -> None:
    assert PoolerConfig.from_model(model(tmp_path)) == PoolerConfig(PoolingType.LAST, normalize=True, max_dimensions=64)


def test_the_default_of_encoders_is_the_first_token(tmp_path: Path) -> None:
    found = PoolerConfig.from_model(model(tmp_path, architectures=["BertModel"], model_type="bert"))
    assert (found.pooling_type, found.normalize) == (PoolingType.CLS, True)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"embedding_dimension": 64, "pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len"),
    ],
)
@pytest.mark.parametrize("modules", [[TRANSFORMER, POOLING], [TRANSFORMER, POOLING, NORMALIZE]])
def test_the_models_files_set_the_pooling(tmp_path: Path, pooling: object, kind: str, modules: list[object]) -> None:
    found = PoolerConfig.from_model(model(tmp_path, modules, pooling))
    assert (found.pooling_type, found.normalize) == (kind, len(modules) == 3)


@pytest.mark.parametrize(
    ("modules", "pooling", "match"),
    [
        ([TRANSFORMER, POOLING, {"type": "sentence_transformers.models.Dense"}], {}, "Dense"),
        ([TRANSFORMER], {}, "one Pooling"),
        ([TRANSFORMER, {**POOLING, "path": "../elsewhere"}], {}, "folder's name"),
        ([TRANSFORMER, POOLING], {"pooling_mode_weightedmean_tokens": True}, "pooling_mode_weightedmean_tokens"),
        ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "one of"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "weightedmean"}, "weightedmean"),
        ([TRANSFORMER, POOLING], [], "an object"),
        ({}, {}, "a list"),
    ],
)
def test_unknown_settings_are_refused_by_name(tmp_path: Path, modules: object, pooling: object, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        PoolerConfig.from_model(model(tmp_path, modules, pooling))


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ModelError, match=r"modules\.json cannot be read"):
        PoolerConfig.from_model(model(tmp_path))


def test_settings_of_a_request_override_the_models_defaults(tmp_path: Path) -> None:
    config = PoolerConfig.from_model(model(tmp_path))
    assert config.resolve_params(PoolingParams()) == PoolingParams(
        pooling_type=PoolingType.LAST, normalize=True, task=PoolingTask.EMBED
    )
    asked = PoolingParams(pooling_type=PoolingType.MEAN, normalize=False, dimensions=64, task=PoolingTask.EMBED)
    assert config.resolve_params(asked) == asked
    with pytest.raises(RequestError, match="64 components"):
        config.resolve_params(PoolingParams(dimensions=65))


def test_only_the_listed_matryoshka_dimensions_are_allowed(tmp_path: Path) -> None:
    config = PoolerConfig.from_model(model(tmp_path, matryoshka_dimensions=[16, 32]))
    for size in (16, 32, 64):
        assert config.resolve_params(PoolingParams(dimensions=size)).dimensions == size
    with pytest.raises(RequestError, match="16, 32, 64"):
        config.resolve_params(PoolingParams(dimensions=20))


def test_the_embedding_size_is_the_output_size_of_the_projection(tmp_path: Path) -> None:
    assert PoolerConfig.from_model(model(tmp_path, word_embed_proj_dim=40)).max_dimensions == 40


@pytest.mark.parametrize(
    "settings",
    [
        {"pooling_type": "most"},
        {"task": "dance"},
        {"use_activation": "yes"},
        {"truncate_prompt_tokens": 0},
        {"second_text_start": -1},
        {"normalize": 1},
        {"dimensions": 0},
        {"dimensions": True},
        {"dimensions": 1.5},
    ],
)
def test_settings_of_the_wrong_type_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        PoolingParams(**settings)
    assert caught.value.parameter == next(iter(settings))


def test_pooling_types_may_be_given_by_their_names() -> None:
    assert PoolingParams(pooling_type="mean").pooling_type is PoolingType.MEAN  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({}, 2, "softmax"),
        ({"id2label": {"0": "no", "1": "yes", "2": "perhaps"}}, 3, "softmax"),
        ({"num_labels": 1}, 1, "sigmoid"),
        ({"id2label": {"0": "it"}, "problem_type": "regression"}, 1, "identity"),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, 4, "sigmoid"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 1, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, 2, "tanh"),
    ],
)
def test_a_classifiers_activation_depends_on_its_problem_type(
    tmp_path: Path, config: dict[str, Any], labels: int, activation: str
) -> None:
    found = PoolerConfig.from_model(model(tmp_path, architectures=["LlamaForSequenceClassification"], **config))
    assert (found.num_labels, found.activation, found.pooling_type) == (labels, activation, PoolingType.LAST)
    settled = found.resolve_params(PoolingParams())
    assert (settled.task, settled.activation, settled.normalize) == (PoolingTask.CLASSIFY, activation, False)
    assert found.resolve_params(PoolingParams(use_activation=False)).activation is Activation.IDENTITY


def test_a_classifiers_labels_must_be_named(tmp_path: Path) -> None:
    for wrong in ({"id2label": []}, {"id2label": "x"}, {"num_labels": -1}, {"num_labels": 2**40}):
        with pytest.raises(ModelError, match=r"id2label|num_labels"):
            model(tmp_path, architectures=["BertForSequenceClassification"], **wrong)


def test_the_longest_text_of_an_encoder_is_in_its_files(tmp_path: Path) -> None:
    bert = {"architectures": ["BertModel"], "model_type": "bert"}
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    assert model(tmp_path, **bert).max_model_len == 24
    assert model(tmp_path).max_model_len == 64  # a generating model
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": null}')
    assert model(tmp_path, **bert).max_model_len == 64
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": "long"}')
    with pytest.raises(ModelError, match="max_seq_length"):
        model(tmp_path, **bert)
