"""Rotary embedding equals transformers' for every RoPE scaling; invalid settings are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, PhiConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from mvllm.config.hf_config import HFConfig
from mvllm.config.rope_parameters import ROPE_TYPES, RopeParameters
from mvllm.errors import ModelError
from mvllm.layers.rotary import RotaryEmbedding
from tests.helpers.paged_driver import make_context

HEAD_SIZE = 32
LENGTH = 300
SCALINGS = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-attention": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.75},
    "yarn-mscale": {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.6},
    "yarn-betas": {
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(HEAD_SIZE // 2)],
        "long_factor": [2.0 + i for i in range(HEAD_SIZE // 2)],
        "original_max_position_embeddings": 64,
    },
    "longrope-factor": {
        "short_factor": [1.0] * (HEAD_SIZE // 2),
        "long_factor": [2.0 + i for i in range(HEAD_SIZE // 2)],
        "original_max_position_embeddings": 64,
        "factor": 16.0,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"partial_rotary_factor": 0.25},
}


def test_every_scaling_that_transformers_knows_is_known_and_tested() -> None:
    general = set(ROPE_TYPES) - {"ntk_alpha"}  # Hunyuan's own, which its checkpoints test
    assert general == {"default", *ROPE_INIT_FUNCTIONS}
    assert {name.partition("-")[0] for name in SCALINGS} == general


def make_config(name: str = "default", theta: float = 10000.0, **settings: object) -> LlamaConfig:
    rope = {"rope_type": name.partition("-")[0], "rope_theta": theta, **SCALINGS.get(name, {}), **settings}
    return LlamaConfig(
        hidden_size=4 * HEAD_SIZE, num_attention_heads=4, max_position_embeddings=128, rope_parameters=rope
    )


def make_rotary(config: dict, head_size: int = HEAD_SIZE, max_len: int = LENGTH) -> RotaryEmbedding:
    return RotaryEmbedding(
        make_context(), RopeParameters.from_config(HFConfig(config, "config.json"), head_size), max_len
    )


def draw(num_tokens: int, head_size: int = HEAD_SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_tokens, 4, head_size, generator=generator), torch.randn(
        num_tokens, 2, head_size, generator=generator
    )


def transformers_rotation(config: LlamaConfig, pieces: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' rotated queries and keys for chunks, like a prompt and the tokens after it."""
    module, results, start = LlamaRotaryEmbedding(config), [], 0
    query, key = draw(sum(pieces))
    for size in pieces:
        rows = slice(start, start + size)
        cos, sin = module(query, torch.arange(start, start + size)[None])
        results.append(apply_rotary_pos_emb(query[rows][None], key[rows][None], cos, sin, unsqueeze_dim=2))
        start += size
    queries, keys = zip(*results, strict=True)
    return torch.cat(queries, dim=1)[0], torch.cat(keys, dim=1)[0]


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_equals_transformers_token_by_token(name: str, theta: float) -> None:
    config = make_config(name, theta)
    expected = transformers_rotation(config, [1] * LENGTH)
    rotary = make_rotary(config.to_dict())
    actual = rotary(rotary.angles(torch.arange(LENGTH, dtype=torch.int32)), *draw(LENGTH))
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("prompt_len", [20, 64, 128, 129, 200])
@pytest.mark.parametrize("name", ["dynamic", "longrope", "longrope-factor", "llama3"])
def test_equals_transformers_for_a_prompt_and_generated_tokens(name: str, prompt_len: int) -> None:
    config = make_config(name)
    expected = transformers_rotation(config, [prompt_len, *[1] * (LENGTH - prompt_len)])
    rotary = make_rotary(config.to_dict())
    prompt_lens = torch.full((LENGTH,), prompt_len, dtype=torch.int32)
    angles = rotary.angles(torch.arange(LENGTH, dtype=torch.int32), prompt_lens)
    torch.testing.assert_close(rotary(angles, *draw(LENGTH)), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("prompt_len", [20, 64, 128, 129, 200])
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_prompt_lens_do_not_matter_from_the_last_token_of_a_prompt_on(name: str, prompt_len: int) -> None:
    rotary = make_rotary(make_config(name).to_dict())
    first = 0 if prompt_len <= rotary.rope.native_len else prompt_len - 1
    positions = torch.arange(first, LENGTH, dtype=torch.int32)
    query, key = draw(len(positions))
    expected = rotary(rotary.angles(positions, torch.full_like(positions, prompt_len)), query.clone(), key.clone())
    torch.testing.assert_close(rotary(rotary.angles(positions), query, key), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("name", "longest_shared"), [("dynamic", 128), ("longrope", 64)])
def test_keys_of_prompts_within_the_original_context_may_be_shared(name: str, longest_shared: int) -> None:
    rotary = make_rotary(make_config(name).to_dict())
    assert rotary.uses_prompt_lens
    assert {rotary.rope.cache_key(n) for n in range(1, longest_shared + 1)} == {0}
    assert rotary.rope.cache_key(longest_shared + 1) != 0


def test_keys_of_longer_prompts_are_shared_only_where_they_are_equal() -> None:
    assert make_rotary(make_config("dynamic").to_dict()).rope.cache_key(150) != make_rotary(
        make_config("dynamic").to_dict()
    ).rope.cache_key(151)
    longrope = make_rotary(make_config("longrope").to_dict())
    assert longrope.rope.cache_key(150) == longrope.rope.cache_key(151)


def test_the_length_of_the_prompt_does_not_matter_where_all_sequences_fit_the_original_context() -> None:
    assert not make_rotary(make_config("dynamic").to_dict(), max_len=128).uses_prompt_lens
    assert not make_rotary(make_config("longrope").to_dict(), max_len=64).uses_prompt_lens
    assert not make_rotary(make_config("yarn").to_dict()).uses_prompt_lens


def test_old_config_keys_equal_new_ones() -> None:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    new = {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **rope}}
    for key in ("type", "rope_type"):
        old = {"max_position_embeddings": 128, "rope_theta": 5e5, "rope_scaling": {key: "llama3", **rope}}
        angles = [make_rotary(config).angles(torch.arange(LENGTH)).cos_sin for config in (new, old)]
        torch.testing.assert_close(*angles, atol=0, rtol=0)


def test_the_original_context_may_be_outside_the_rope_object() -> None:
    outside = make_config("yarn").to_dict()
    length = outside["rope_parameters"].pop("original_max_position_embeddings")
    outside["original_max_position_embeddings"] = length
    angles = [make_rotary(c).angles(torch.arange(9)).cos_sin for c in (outside, make_config("yarn").to_dict())]
    torch.testing.assert_close(*angles, atol=0, rtol=0)


def test_a_scaled_partial_rotation_does_not_change_the_rest_of_the_head() -> None:
    """Compared with Phi, which rotates the first part of a head."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = PhiConfig(hidden_size=4 * HEAD_SIZE, num_attention_heads=4, rope_parameters=rope)
    query, key = draw(LENGTH)
    cos, sin = PhiRotaryEmbedding(config)(query, torch.arange(LENGTH)[None])
    part = cos.shape[-1]
    assert part == HEAD_SIZE // 2
    q, k = apply_rotary_pos_emb(query[None, ..., :part], key[None, ..., :part], cos, sin, unsqueeze_dim=2)
    rotary = make_rotary(config.to_dict())
    actual_q, actual_k = rotary(rotary.angles(torch.arange(LENGTH)), query, key)
    torch.testing.assert_close(actual_q, torch.cat((q[0], query[..., part:]), dim=-1), atol=2e-6, rtol=0)
    torch.testing.assert_close(actual_k, torch.cat((k[0], key[..., part:]), dim=-1), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "spiral"}, "'spiral' is not supported. Supported: default, linear"),
        ({"rope_type": "linear"}, "'linear' requires factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "requires low_freq_factor, high_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 2.0}, "head_size=32.*not 64"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "a list of 16 numbers"),
        ({"rope_type": "longrope", "short_factor": ["x"] * 16, "long_factor": [1.0] * 16}, "a list of 16 numbers"),
        ({"rope_type": "default", "rope_theta": float("nan")}, "rope_theta of the RoPE settings should be a number"),
        ({"rope_type": "linear", "factor": "two"}, "factor of the RoPE settings should be a number > 0, found 'two'"),
        ({"rope_type": "linear", "factor": 0}, "factor of the RoPE settings should be a number > 0, found 0"),
        ({"full_attention": {"rope_type": "default"}}, "one flat JSON object"),
    ],
)
def test_invalid_settings_are_refused(rope: dict, words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        make_rotary({"max_position_embeddings": 128, "rope_parameters": rope})
    assert "config.json" in str(error.value)


@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", ["x", float("inf"), -1])
def test_settings_outside_the_rope_object_are_checked_too(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"'{key}' should be a number > 0"):
        make_rotary(
            {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, key: value}
        )


def test_an_odd_head_cannot_be_rotated() -> None:
    with pytest.raises(ModelError, match=r"head_size=5.*not 5"):
        make_rotary({"max_position_embeddings": 128}, head_size=5)
