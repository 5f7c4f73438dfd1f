"""max_model_len: from the config, the RoPE scaling and the user's setting."""

from __future__ import annotations

import pytest

from mvllm.config.context_length import resolve_max_model_len
from mvllm.config.hf_config import HFConfig
from mvllm.errors import ConfigError, ModelError


def length(asked: int | None = None, **values) -> int:
    return resolve_max_model_len(HFConfig(values, "config.json"), asked)


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions", "max_seq_len"])
def test_families_use_different_keys(key):
    assert length(**{key: 77}) == 77


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 2.0}, 2000),
        ({"type": "linear", "factor": 2.0}, 2000),
        ({"rope_type": "dynamic", "factor": 1.5}, 1500),
        ({"rope_type": "yarn", "factor": 4}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "yarn", "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 125}, 1000),
        ({"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 125}, 1000),
        ({"full_attention": {"rope_type": "linear", "factor": 3}, "sliding_attention": {"rope_type": "default"}}, 3000),
        ({}, 1000),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_some_rope_scalings_extend_it(key, rope, expected):
    assert length(max_position_embeddings=1000, **{key: rope}) == expected


def test_the_context_length_of_gemma_3_does_not_depend_on_its_scaling():
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    assert length(model_type="gemma3_text", max_position_embeddings=1000, rope_parameters=rope) == 1000


def test_falcon_configs_may_omit_it():
    assert length(model_type="falcon") == 2048
    with pytest.raises(ConfigError, match=r"at most 2048 tokens \(what falcon models have by default"):
        length(2049, model_type="falcon")


def test_max_model_len_up_to_the_context_length_is_permitted_and_beyond_it_refused():
    assert length(1000, max_position_embeddings=1000) == 1000
    assert length(1, max_position_embeddings=1000) == 1
    with pytest.raises(
        ConfigError, match=r"max_model_len is 1001.*at most 1000 tokens.*max_position_embeddings = 1000"
    ):
        length(1001, max_position_embeddings=1000)


def test_the_reason_names_the_scaling():
    with pytest.raises(ConfigError, match=r"at most 2000 tokens .*linear rope scaling's factor 2"):
        length(2001, max_position_embeddings=1000, rope_scaling={"rope_type": "linear", "factor": 2.0})


def test_a_config_without_a_length_requires_the_setting():
    assert length(50) == 50
    with pytest.raises(ModelError, match="Pass max_model_len"):
        length()


@pytest.mark.parametrize("factor", [0, 0.99, -1.0, 1e300, 10**400, "2", True, [2], float("inf"), float("nan")])
def test_an_impossible_factor_is_refused(factor):
    with pytest.raises(ModelError, match="'factor' should be >= 1"):
        length(max_position_embeddings=10, rope_scaling={"rope_type": "linear", "factor": factor})


@pytest.mark.parametrize(
    "values",
    [
        {"max_position_embeddings": 0},
        {"max_position_embeddings": "many"},
        {"max_position_embeddings": 10, "rope_scaling": "linear"},
        {
            "max_position_embeddings": 10,
            "rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0},
        },
    ],
)
def test_impossible_values_are_model_errors(values):
    with pytest.raises(ModelError, match=r"config\.json"):
        length(**values)
