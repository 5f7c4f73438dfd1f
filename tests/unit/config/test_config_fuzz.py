"""Any contents of a model folder's JSON files give a ModelConfig or a user error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.config.model import ModelConfig
from mvllm.config.model_builder import build_model_config
from mvllm.errors import ConfigError, ModelError
from tests.unit.config.folders import GPT2, LLAMA

numbers = st.one_of(
    st.integers(-3, 5), st.sampled_from([2**31, 2**63 - 1, 2**63, 10**400, -(10**400)]), st.floats(), st.just(1e308)
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=4), st.sampled_from(["yarn", "linear", "llama"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["rope_type", "type", "factor", "original_max_position_embeddings", "full_attention", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=6,
)
KEYS = [
    *LLAMA,
    *GPT2,
    "head_dim",
    "torch_dtype",
    "sliding_window",
    "use_sliding_window",
    "rope_scaling",
    "rope_parameters",
    "quantization_config",
    "text_config",
]
GENERATION_KEYS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "eos_token_id",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("model")


@given(
    base=st.sampled_from([LLAMA, GPT2]),
    changes=st.dictionaries(st.sampled_from(KEYS), values, max_size=3),
    generation=st.dictionaries(st.sampled_from(GENERATION_KEYS), values, max_size=2),
    max_model_len=st.sampled_from([None, 1, 64, 2**62]),
)
def test_any_values_give_a_config_or_an_error_for_the_user(folder, base, changes, generation, max_model_len):
    (folder / "config.json").write_text(json.dumps({**base, **changes}))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    try:
        found = build_model_config(
            model="m", folder=folder, tokenizer=None, max_model_len=max_model_len, generation_config=folder
        )
    except (ModelError, ConfigError) as e:
        assert "config.json" in str(e)
    else:
        assert isinstance(found, ModelConfig)
        sizes = (found.hidden_size, found.num_layers, found.num_heads, found.num_kv_heads, found.head_size)
        assert min(*sizes, found.vocab_size, found.max_model_len) >= 1
        assert found.num_heads % found.num_kv_heads == 0
        assert all(0 <= token_id < found.vocab_size for token_id in found.eos_token_ids)
