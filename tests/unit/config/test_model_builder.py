"""From config.json to ModelConfig: the families' different keys, and invalid configs."""

from __future__ import annotations

import json

import pytest

from mvllm.config.model import ModelConfig
from mvllm.config.model_builder import build_model_config, load_hf_config
from mvllm.errors import ModelError
from tests.unit.config.folders import GPT2, LLAMA, write_folder


def build(folder, base=LLAMA, overrides=None, **changes) -> ModelConfig:
    write_folder(folder, base, **changes)
    return build_model_config(model="m", folder=folder, tokenizer=None, hf_overrides=overrides)


# ------------------------------------------------------------------------------------------ transformers is the oracle

CASES = [
    ("LlamaConfig", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ("LlamaConfig", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}),
    ("LlamaConfig", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": None}),
    ("Qwen2Config", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1}),
    ("Qwen2Config", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 16}),
    (
        "Qwen2Config",
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "sliding_window": 16,
            "use_sliding_window": True,
        },
    ),
    ("Qwen3Config", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ("Qwen3Config", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}),
    ("MistralConfig", {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}),
    ("MistralConfig", {"hidden_size": 64, "num_attention_heads": 8, "sliding_window": None}),
    ("MistralConfig", {"hidden_size": 64, "num_attention_heads": 8, "sliding_window": 12}),
    ("Gemma2Config", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ("Gemma3TextConfig", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}),
    ("Phi3Config", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 12}),
    ("GraniteConfig", {"hidden_size": 64, "num_attention_heads": 4}),
    ("Olmo2Config", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ("Olmo3Config", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ("SmolLM3Config", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None}),
    ("Exaone4Config", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ("Cohere2Config", {"hidden_size": 64, "num_attention_heads": 4, "sliding_window": 12}),
    ("Ministral3Config", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ("GlmConfig", {"hidden_size": 64, "num_attention_heads": 4}),
    ("Glm4Config", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}),
    ("Starcoder2Config", {"hidden_size": 64, "num_attention_heads": 4, "sliding_window": 12}),
    ("OPTConfig", {"hidden_size": 48, "num_attention_heads": 4, "word_embed_proj_dim": 16}),
    ("GPT2Config", {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 64}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_sizes_equal_those_that_transformers_reads(tmp_path, name, settings):
    transformers = pytest.importorskip("transformers")
    oracle = getattr(transformers, name)(**{"vocab_size": 99, "num_hidden_layers": 2, **settings})
    oracle.save_pretrained(tmp_path)
    found = build_model_config(model="m", folder=tmp_path, tokenizer=None)

    heads = oracle.num_attention_heads
    head_dim = getattr(oracle, "head_dim", None) or oracle.hidden_size // heads
    assert found.hidden_size == oracle.hidden_size
    assert found.num_layers == oracle.num_hidden_layers
    assert found.num_heads == heads
    assert found.num_kv_heads == (getattr(oracle, "num_key_value_heads", None) or heads)
    assert found.head_size == head_dim
    assert found.vocab_size == 99
    assert found.max_model_len == oracle.max_position_embeddings
    assert found.sliding_window == getattr(oracle, "sliding_window", None)
    assert found.architecture.lower().startswith(oracle.model_type.removesuffix("_text"))


def test_missing_keys_have_the_defaults_of_transformers(tmp_path):
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert build(tmp_path, mistral).sliding_window == 4096
    assert build(tmp_path, mistral, sliding_window=None).sliding_window is None
    qwen3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert build(tmp_path, qwen3).head_size == 128
    assert build(tmp_path, num_key_value_heads=...).num_kv_heads == 4


@pytest.mark.parametrize("name", ["MiniMaxM2", "Llama4Text", "Cohere2Moe", "NemotronH"])
def test_a_missing_head_size_is_that_of_the_family(tmp_path, name):
    oracle = getattr(pytest.importorskip("transformers"), f"{name}Config")(num_key_value_heads=2)
    assert build(tmp_path, model_type=oracle.model_type).head_size == oracle.head_dim


@pytest.mark.parametrize("name", ["ExaoneMoe", "Cohere2Moe"])
def test_a_missing_window_is_that_of_the_family(tmp_path, name):
    oracle = getattr(pytest.importorskip("transformers"), f"{name}Config")()
    assert build(tmp_path, model_type=oracle.model_type).sliding_window == oracle.sliding_window == 4096


@pytest.mark.parametrize(
    ("keys", "found"), [({"num_experts_per_tok": 4}, 4), ({"num_experts_per_tok": 4, "moe_topk": [2, 3]}, [2, 3])]
)
def test_a_second_name_of_a_key_is_read_where_the_first_is_absent(tmp_path, keys, found):
    write_folder(tmp_path, {"model_type": "some", "text_config": {"model_type": "hunyuan_v1_moe", **keys}})
    assert load_hf_config(tmp_path).get("moe_topk") == found


# ------------------------------------------------------------------------------------------------------------- reading


def test_a_llama_never_has_a_sliding_window(tmp_path):
    assert build(tmp_path, sliding_window=16).sliding_window is None


def test_the_text_config_of_a_composite_config_overrides_the_rest(tmp_path):
    inner = {key: value for key, value in LLAMA.items() if key not in ("architectures", "dtype")}
    outer = {
        "architectures": ["LlavaForConditionalGeneration"],
        "hidden_size": 7,
        "torch_dtype": "float16",
        "text_config": {**inner, "architectures": ["LlamaForCausalLM"]},
    }
    found = build(tmp_path, outer)
    assert (found.hidden_size, found.num_layers, found.checkpoint_dtype) == (64, 2, "float16")
    assert found.architecture == "LlavaForConditionalGeneration"
    assert found.hf_config.get("intermediate_size") == 128


def test_overrides_win_over_everything(tmp_path):
    inner = {key: value for key, value in LLAMA.items() if key != "architectures"}
    outer = {"architectures": ["LlamaForCausalLM"], "text_config": inner}
    found = build(tmp_path, outer, overrides={"max_position_embeddings": 4096, "num_hidden_layers": 1})
    assert (found.max_model_len, found.num_layers) == (4096, 1)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("opt", "OPTForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
    ],
)
def test_a_config_without_architectures_is_identified_by_its_model_type(tmp_path, model_type, architecture):
    assert build(tmp_path, architectures=..., model_type=model_type).architecture == architecture


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": ..., "torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.float32"}, "float32"),
        ({"dtype": "half"}, "float16"),
        ({"dtype": ...}, "float32"),
        ({"dtype": None}, "float32"),
    ],
)
def test_the_dtype_of_the_checkpoint(tmp_path, changes, expected):
    found = build(tmp_path, **changes)
    assert (found.dtype, found.checkpoint_dtype) == ("auto", expected)


def test_code_in_the_folder_is_ignored_if_the_architecture_is_known(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')")
    found = build(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.C"})
    assert found.architecture == "LlamaForCausalLM"
    assert not marker.exists()


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"]
)
def test_a_missing_key_is_named(tmp_path, key):
    with pytest.raises(ModelError, match=rf"config\.json.*{key}"):
        build(tmp_path, **{key: ...})


@pytest.mark.parametrize("key", ["n_embd", "n_layer", "n_head", "n_positions", "vocab_size"])
def test_a_wrong_value_is_named_under_the_key_that_the_family_uses(tmp_path, key):
    with pytest.raises(ModelError, match=rf"'{key}' should be an integer, found 'many'"):
        build(tmp_path, GPT2, **{key: "many"})


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [0, -4, 2.5, "64", True, [64], {"a": 1}])
def test_sizes_are_positive_integers(tmp_path, key, value):
    with pytest.raises(ModelError, match=rf"config\.json: '{key}' should be"):
        build(tmp_path, **{key: value})


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim"])
def test_sizes_beyond_any_model_are_refused_before_anything_is_allocated(tmp_path, key):
    with pytest.raises(ModelError, match=f"'{key}' should be at most"):
        build(tmp_path, **{key: 10**12})


@pytest.mark.parametrize("value", ["x", [], -1, 0, float("nan"), float("inf"), True])
def test_numbers_are_positive_and_finite(tmp_path, value):
    config = build(tmp_path, rms_norm_eps=value).hf_config
    with pytest.raises(ModelError, match="'rms_norm_eps' should be a number > 0"):
        config.positive_number("rms_norm_eps", 1e-6)
    assert config.positive_number("absent", 1e-6) == 1e-6


def test_heads_must_divide_the_hidden_size_unless_their_size_is_given(tmp_path):
    with pytest.raises(ModelError, match=r"'hidden_size' is 66.*'num_attention_heads' = 4 does not divide"):
        build(tmp_path, hidden_size=66)
    assert build(tmp_path, hidden_size=66, head_dim=8).head_size == 8
    with pytest.raises(ModelError, match=r"'n_embd' is 50.*'n_head' = 6 does not divide"):
        build(tmp_path, GPT2, n_embd=50)


def test_query_heads_share_key_value_heads_in_equal_groups(tmp_path):
    with pytest.raises(ModelError, match=r"'num_attention_heads' is 4.*'num_key_value_heads' = 3"):
        build(tmp_path, num_key_value_heads=3)


@pytest.mark.parametrize("value", [[], "LlamaForCausalLM", [3], {}, 1])
def test_architectures_must_be_a_list_of_names(tmp_path, value):
    with pytest.raises(ModelError, match="'architectures' should be a list of class names"):
        build(tmp_path, architectures=value)


def test_an_unknown_model_type_without_architectures_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no key 'architectures', and its 'model_type' \('acme'\)"):
        build(tmp_path, architectures=..., model_type="acme")


@pytest.mark.parametrize("value", ["float8_e4m3fn", "int8", 7, ["float32"]])
def test_an_unsupported_compute_dtype_is_refused(tmp_path, value):
    with pytest.raises(ModelError, match="'dtype' should be one of float32, bfloat16, float16"):
        build(tmp_path, dtype=value)


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({}, None),
        ({"quantization_config": {}}, None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"compression_config": {"quant_method": "compressed_tensors"}}, "compressed-tensors"),
        ({"compression_config": {"config_groups": {}}}, "compressed-tensors"),
    ],
)
def test_the_quantization_method_is_read_from_the_checkpoint(tmp_path, changes, method):
    assert build(tmp_path, **changes).quantization == method


@pytest.mark.parametrize("value", [{"bits": 4}, {"quant_method": 3}, {"quant_method": ""}, ["gptq"]])
def test_a_quantization_config_without_a_method_is_refused_with_a_hint(tmp_path, value):
    with pytest.raises(ModelError, match=r"quantization_config.*'?quant_method'?"):
        build(tmp_path, quantization_config=value)


@pytest.mark.parametrize("value", [0, -1, 3.5, "16"])
def test_a_window_is_a_positive_integer(tmp_path, value):
    with pytest.raises(ModelError, match="'sliding_window' should be"):
        build(tmp_path, model_type="mistral", sliding_window=value)


def test_a_folder_without_a_config_says_so(tmp_path):
    with pytest.raises(ModelError, match=r"not a model folder: it has no config\.json"):
        build_model_config(model="m", folder=tmp_path, tokenizer=None)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, '{"a": ' * 50_000, "\xff\xfe"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        build_model_config(model="m", folder=tmp_path, tokenizer=None)


def test_a_text_config_that_is_no_object_is_refused(tmp_path):
    with pytest.raises(ModelError, match="'text_config' should be a JSON object"):
        build(tmp_path, text_config=[1])


def test_the_default_values_of_transformers_v4_files_are_understood(tmp_path):
    """A file as published with Llama 3.1, with the old keys."""
    published = {
        **LLAMA,
        "dtype": ...,
        "torch_dtype": "bfloat16",
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "max_position_embeddings": 131072,
        "eos_token_id": [128001, 128008, 128009],
        "vocab_size": 128256,
    }
    found = build(tmp_path, **published)
    assert (found.max_model_len, found.checkpoint_dtype) == (131072, "bfloat16")
    assert found.eos_token_ids == (128001, 128008, 128009)
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 500000.0


def test_the_default_logprobs_limit_fits_a_vocabulary_smaller_than_it(tmp_path):
    folder = write_folder(tmp_path, {**LLAMA, "vocab_size": 8, "eos_token_id": 2})
    assert build_model_config(model="m", folder=folder, tokenizer=None).max_logprobs == 8


# ------------------------------------------------------------------------------------------ checkpoints without a head


def write_names(folder, names, *, file="model.safetensors") -> None:
    """A safetensors file of empty tensors."""
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    (folder / file).write_bytes(len(header).to_bytes(8, "little") + header)


BODY = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")


@pytest.mark.parametrize(
    ("names", "lacks"),
    [
        (BODY, True),
        ([name.removeprefix("model.") for name in BODY], True),
        (["model.language_model.norm.weight", "model.visual.blocks.0.head.weight"], True),
        (["model.norm.weight", "vision_tower.vision_model.head.probe"], True),
        (["model.layers.0.self_attn.head.weight", "model.norm.weight"], True),
        ([*BODY, "lm_head.weight"], False),
        ([*BODY, "lm_head.weight_packed"], False),
        ([*BODY, "language_model.lm_head.weight"], False),
        ([*BODY, "embed_out.weight"], False),
        ([*BODY, "output.weight"], False),
        ([*BODY, "generation_head.weight"], False),
        ([], False),
    ],
)
def test_a_checkpoint_that_has_no_head_makes_embeddings(tmp_path, names, lacks):
    write_names(tmp_path, names)
    found = build(tmp_path, tie_word_embeddings=False).kind
    assert (found.lacks_head, found.generates) == (lacks, not lacks)
    for changes in ({"tie_word_embeddings": True}, {}):  # the embedding is the head, or may be
        assert build(tmp_path, **changes).kind.generates
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert build(tmp_path, tie_word_embeddings=False).kind.lacks_head == lacks
    (tmp_path / "model.safetensors.index.json").unlink()
    write_names(tmp_path, names[:1], file="model-00001-of-00002.safetensors")
    write_names(tmp_path, names[1:], file="model-00002-of-00002.safetensors")
    assert build(tmp_path, tie_word_embeddings=False).kind.lacks_head == lacks


def test_damaged_files_are_left_to_the_loader(tmp_path):
    for data in (b"", b"\xff" * 100, b"\x02" + b"\0" * 7 + b"[]"):
        (tmp_path / "model.safetensors").write_bytes(data)
        assert build(tmp_path, tie_word_embeddings=False).kind.generates
