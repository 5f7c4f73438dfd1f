"""Sampling defaults and end-of-sequence tokens of checkpoints."""

from __future__ import annotations

import pytest

from mvllm.config.generation_config import end_token_ids, load_generation_config, sampling_defaults
from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError


def config(**values) -> HFConfig:
    return HFConfig(values, "generation_config.json")


def test_the_known_keys_become_sampling_parameters():
    defaults = sampling_defaults(
        config(
            temperature=0.6,
            top_p=0.9,
            top_k=50,
            min_p=0.05,
            repetition_penalty=1.1,
            max_new_tokens=256,
            do_sample=True,
            num_beams=4,
            bos_token_id=1,
        )
    )
    assert defaults == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_tokens": 256,
    }


def test_null_and_missing_keys_have_no_effect():
    assert sampling_defaults(config(temperature=None)) == {}


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("temperature", [0, 0.0, 5], [-0.1, 10**400, float("nan"), float("inf"), "1", True, [1]]),
        ("top_p", [1e-9, 1, 1.0], [0, 1.0001, -1]),
        ("top_k", [-1, 0, 50, 50.0], [-2, 1.5, "50", True]),
        ("min_p", [0, 1], [-0.01, 1.01]),
        ("repetition_penalty", [0.001, 2], [0, -1]),
        ("max_new_tokens", [1, 1e6], [0, -5, 1.5, 10**400]),
    ],
)
def test_values_outside_their_range_are_refused(key, good, bad):
    for value in good:
        assert len(sampling_defaults(config(**{key: value}))) == 1
    for value in bad:
        with pytest.raises(ModelError, match=rf"generation_config.json: '{key}' should be .*found"):
            sampling_defaults(config(**{key: value}))


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        (None, None, ()),
        (5, None, (5,)),
        (None, 5, (5,)),
        ([7, 8], 5, (7, 8, 5)),
        ([7, 5], [5, 7], (7, 5)),
        (0, None, (0,)),
    ],
)
def test_end_tokens_come_from_both_files_the_generation_config_first(generation, model, expected):
    ids = end_token_ids(config(eos_token_id=generation), HFConfig({"eos_token_id": model}, "config.json"), 10)
    assert ids == expected


def test_end_tokens_outside_the_vocabulary_are_left_out(caplog):
    assert end_token_ids(config(eos_token_id=[9, 10, -1]), config(), 10) == (9,)
    assert "eos_token_id 10 is outside the vocabulary" in caplog.text


@pytest.mark.parametrize("value", ["2", [1, "2"], True, 2.0, {"a": 1}])
def test_end_tokens_of_another_type_are_refused(value):
    with pytest.raises(ModelError, match="'eos_token_id' should be an integer or a list of integers"):
        end_token_ids(config(eos_token_id=value), config(), 10)


def test_a_folder_without_the_file_has_no_defaults(tmp_path):
    assert sampling_defaults(load_generation_config(tmp_path)) == {}


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "[" * 100_000, "\xff"])
def test_a_broken_file_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load_generation_config(tmp_path)
