"""The setting speculative_config, and the errors for invalid values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mvllm.config.draft_method import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from mvllm.config.engine_args import EngineArgs
from mvllm.errors import ConfigError, ModelError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2000,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SMALL = {"num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 32}


def write(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write(tmp_path / "target")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small", **SMALL)


def read(target: Path, settings: Any, **more: Any) -> SpeculativeConfig | None:
    args = EngineArgs.from_kwargs(
        model=str(target), skip_tokenizer_init=True, speculative_config=settings, load_format="dummy", **more
    )
    return args.create_engine_config().speculative


def refusal(target: Path, settings: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(target, settings, **more)
    return str(caught.value)


def test_speculative_decoding_is_off_by_default(target: Path) -> None:
    assert read(target, None) is None


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({}, (2, 4)),
        ({"method": "ngram"}, (2, 4)),
        ({"model": "[ngram]"}, (2, 4)),
        ({"model": "ngram", "method": "ngram", "prompt_lookup_max": 5}, (2, 5)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 3}, (3, 4)),
        ({"prompt_lookup_min": 64, "prompt_lookup_max": 64}, (64, 64)),
    ],
)
def test_n_gram_lengths_have_defaults(target: Path, settings: dict[str, Any], bounds: tuple[int, int]) -> None:
    found = read(target, {"num_speculative_tokens": 5, **settings})
    assert found is not None and found.num_lookahead_tokens == 0
    assert found == SpeculativeConfig("ngram", 5, *bounds, proposer=found.proposer)


def test_a_draft_models_config_is_read_from_its_folder(target: Path, small: Path) -> None:
    settings = {"model": str(small), "num_speculative_tokens": 3}
    found = read(target, settings, max_model_len=48, hf_overrides={"num_hidden_layers": 1, "num_attention_heads": 8})
    assert found is not None and found.model is not None and found.method == "draft_model"
    assert (found.model.num_heads, found.model.num_layers, found.model.max_model_len) == (2, 1, 32)
    assert found.num_lookahead_tokens == 3
    named = read(target, {**settings, "method": "draft_model"})
    assert named is not None and named.model is not None and named.model.path == found.model.path


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"method": "medusa", "num_speculative_tokens": 2},
            ["'medusa' is not supported: it drafts with heads", "There are 'ngram'"],
        ),
        (
            {"method": ["ngram"], "num_speculative_tokens": 2},
            ["method ['ngram'] does not exist", "'draft_model', which runs a smaller model"],
        ),
        ({"method": None, "num_speculative_tokens": 2}, ["method None does not exist"]),
        ({"method": "ngrm", "num_speculative_tokens": 2}, ["Did you mean 'ngram'?"]),
        ({"method": "ngram"}, ["num_speculative_tokens is missing", "for instance 4"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens must be an integer from 1 to 64", "found 0"]),
        ({"num_speculative_tokens": MAX_SPECULATIVE_TOKENS + 1}, ["from 1 to 64", "found 65"]),
        ({"num_speculative_tokens": True}, ["must be an integer", "found True"]),
        ({"num_speculative_tokens": "4"}, ["must be an integer", "found '4'"]),
        ({"num_speculative_tokens": 2.0}, ["must be an integer", "found 2.0"]),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": 0}, ["prompt_lookup_max must be", "found 0"]),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 65}, ["prompt_lookup_min must be", "found 65"]),
        (
            {"num_speculative_tokens": 2, "prompt_lookup_min": 5},
            ["prompt_lookup_min is 5", "prompt_lookup_max (4)", "Lower the one or raise the other"],
        ),
        ({"num_speculative_tokens": 2, "tokens": 3}, ["has the key 'tokens'", "Its keys: method, num_sp"]),
        ({"num_speculative_tokens": 2, 3: 3}, ["has the key 3"]),
        ({"method": "draft_model", "num_speculative_tokens": 2}, ["model is missing. Set the folder or hub name"]),
        ({"model": 7, "num_speculative_tokens": 2}, ["model must be a text, found 7"]),
        ("ngram", ["speculative_config must be a JSON object", "found 'ngram'"]),
        ([], ["speculative_config must be a JSON object"]),
    ],
    ids=str,
)
def test_invalid_settings_are_errors_that_name_them(target: Path, settings: Any, parts: list[str]) -> None:
    message = refusal(target, settings)
    assert "speculative_config" in message
    for part in parts:
        assert part in message


def test_names_of_other_engines_for_methods_are_accepted(tmp_path: Path, small: Path) -> None:
    mimo = write(tmp_path / "mimo", architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1)
    for name in ("mtp", "deepseek_mtp", "mimo_mtp", "qwen3_next_mtp", "NEXTN", "draft-mtp"):
        for more in ({}, {"model": str(mimo)}):  # vLLM's scripts name the served model again
            found = read(mimo, {"method": name, **more})
            assert found is not None and (found.method, found.num_speculative_tokens) == ("mtp", 1)
    message = refusal(mimo, {"method": "mtp", "model": str(small)})
    assert f"({mimo}), but model is {str(small)!r:.80}" in message and "Leave model out" in message
    for name in ("STANDALONE", "draft-simple"):
        found = read(mimo, {"method": name, "model": str(small), "num_speculative_tokens": 2})
        assert found is not None and found.method == "draft_model"
    found = read(mimo, {"method": "NGRAM", "num_speculative_tokens": 2})
    assert found is not None and found.method == "ngram"
    assert "the method 'mtp' drafts with" in refusal(small, {"method": "deepseek_mtp"})


def test_settings_of_the_other_method_are_refused(target: Path, small: Path) -> None:
    both = {"method": "ngram", "model": str(small), "num_speculative_tokens": 2}
    assert "key 'model', which the method 'ngram' does not have" in refusal(target, both)
    both = {"model": str(small), "prompt_lookup_max": 2, "num_speculative_tokens": 2}
    assert "has the key 'prompt_lookup_max'" in refusal(target, both)
    typed = {"model": str(small), "num_speculative_tokens": 2, "revision": 3}
    assert "revision must be a text, found 3" in refusal(target, typed)
    typed = {"model": str(small), "num_speculative_tokens": 2, "quantization": 3}
    assert "quantization must be a text, found 3" in refusal(target, typed)


def test_target_and_draft_model_need_the_same_tokenizer(target: Path, tmp_path: Path) -> None:
    near = write(tmp_path / "near", vocab_size=2000 + 1024)
    assert read(target, {"model": str(near), "num_speculative_tokens": 2}) is not None
    far = write(tmp_path / "far", vocab_size=2000 + 1025)
    message = refusal(target, {"model": str(far), "num_speculative_tokens": 2})
    assert "has 3025 tokens, the model's 2000" in message and "the same tokenizer" in message


def test_pooling_models_can_be_neither_target_nor_draft_model(target: Path, tmp_path: Path) -> None:
    encoder = write(tmp_path / "encoder", architectures=["BertModel"], model_type="bert")
    message = refusal(target, {"model": str(encoder), "num_speculative_tokens": 2})
    assert f"{encoder} generates no tokens, so it cannot be a draft model" in message
    message = refusal(encoder, {"num_speculative_tokens": 2})
    assert "the model generates no tokens. Leave it out" in message


def test_a_draft_model_that_is_not_there_is_named(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        read(target, {"model": str(tmp_path / "nowhere"), "num_speculative_tokens": 2})


def test_the_heads_of_both_models_are_checked_against_tensor_parallel_size(target: Path, tmp_path: Path) -> None:
    odd = write(tmp_path / "odd", num_attention_heads=1, num_hidden_layers=1)
    settings = {"model": str(odd), "num_speculative_tokens": 2}
    message = refusal(target, settings, tensor_parallel_size=2)
    assert f"does not divide {odd}'s 1 attention heads" in message
    # The draft model runs whole on the last stage, so it may have fewer layers than there are stages.
    assert read(target, settings, pipeline_parallel_size=2) is not None


def write_tokenizer(folder: Path, vocab: Any, *added: tuple[int, str]) -> None:
    tokens = [{"id": id_, "content": content} for id_, content in added]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens}))


def test_a_draft_model_with_another_tokenizer_is_refused(target: Path, small: Path) -> None:
    settings = {"model": str(small), "num_speculative_tokens": 3}
    write_tokenizer(target, {"a": 0, "b": 1, "c": 2}, (3, "<end>"))
    assert read(target, settings) is not None  # the draft model's is not known
    write_tokenizer(small, {"b": 1, "a": 0, "c": 2, "d": 5}, (3, "<end>"), (4, "<pad>"))
    assert read(target, settings) is not None  # more tokens
    write_tokenizer(small, [["a", -1.0], ["b", -2.0], ["c", -2.5]])
    assert read(target, settings) is not None  # another form of the same tokens
    for vocab, added, difference in (
        ({"a": 0, "c": 1, "b": 2}, (3, "<end>"), "the token 1 is 'c' there, and 'b' here"),
        ({"a": 0, "b": 1, "c": 2}, (3, "<eos>"), "the token 3 is '<eos>' there, and '<end>' here"),
        ([["b", 0.0]], (3, "<end>"), "the token 0 is 'b' there, and 'a' here"),
    ):
        write_tokenizer(small, vocab, added)
        message = refusal(target, settings)
        assert "has another tokenizer than" in message and difference in message
    (small / "tokenizer.json").write_text("{")
    assert read(target, settings) is not None
