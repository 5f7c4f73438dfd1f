"""Token spaces from a model's config: where their ids may lie, and how a plugin's model declares them."""

from __future__ import annotations

import pytest

from mvllm.config.model import ModelConfig
from mvllm.config.model_builder import build_model_config
from mvllm.config.token_spaces import TokenSpace, check_token_spaces
from mvllm.errors import ModelError
from tests.unit.config.folders import LLAMA, write_folder

VOCAB_SIZE = LLAMA["vocab_size"]


def build(folder, **spaces: object) -> ModelConfig:
    write_folder(folder, LLAMA, token_spaces=spaces)
    return build_model_config(model="m", folder=folder, tokenizer=None)


def test_a_config_declares_spaces(tmp_path):
    fields = {"first": VOCAB_SIZE, "size": 16, "num_tokens": 4, "begin_token_ids": [3], "pad_token_id": 2}
    config = build(tmp_path, image=fields, digits={"first": 5, "size": 10, "has_own_head": False})
    image = config.token_spaces["image"]
    assert image == TokenSpace("image", VOCAB_SIZE, 16, 4, begin_token_ids=(3,), pad_token_id=2)
    assert image.codes_of([VOCAB_SIZE, VOCAB_SIZE + 15]) == [0, 15]
    assert (config.vocab_size, config.num_token_ids) == (VOCAB_SIZE, VOCAB_SIZE + 16)


def test_a_text_model_has_the_ids_of_its_vocabulary(tmp_path):
    write_folder(tmp_path, LLAMA)
    config = build_model_config(model="m", folder=tmp_path, tokenizer=None)
    assert config.token_spaces == {}
    assert config.num_token_ids == VOCAB_SIZE


@pytest.mark.parametrize(
    ("spaces", "message"),
    [
        ({"image": {"first": VOCAB_SIZE}}, "'image' needs 'first' and 'size'"),
        ({"image": {"first": VOCAB_SIZE, "size": "4"}}, "'image' has size='4'"),
        ({"image": {"first": VOCAB_SIZE, "size": 4, "head": 1}}, "'image' has head=1. Its fields are first"),
        ({"image": 4}, "should be an object of names to objects with 'first' and 'size'"),
        ({"text": {"first": VOCAB_SIZE, "size": 4}}, "A space needs a name other than 'text'"),
        ({"image": {"first": VOCAB_SIZE, "size": 0}}, "at least one id"),
        ({"image": {"first": VOCAB_SIZE + 1, "size": 4}}, f"with its own head must begin at {VOCAB_SIZE}"),
        ({"image": {"first": 3, "size": 4}}, f"with its own head must begin at {VOCAB_SIZE}"),
        (
            {"image": {"first": VOCAB_SIZE - 1, "size": 4, "has_own_head": False}},
            f"one without must lie within the vocabulary of {VOCAB_SIZE} tokens",
        ),
        ({"image": {"first": VOCAB_SIZE, "size": 4, "begin_token_ids": ["a"]}}, f"ids below {VOCAB_SIZE}, found 'a'"),
        (
            {"image": {"first": VOCAB_SIZE, "size": 4, "pad_token_id": VOCAB_SIZE}},
            f"below {VOCAB_SIZE}, found {VOCAB_SIZE}",
        ),
    ],
)
def test_spaces_without_valid_ids_are_refused(tmp_path, spaces, message):
    with pytest.raises(ModelError, match=message.replace("[", r"\[")):
        build(tmp_path, **spaces)


def test_several_spaces_follow_each_other():
    first, second = TokenSpace("a", 10, 5), TokenSpace("b", 15, 2)
    assert check_token_spaces({"b": second, "a": first}, 10, "config.json")
    with pytest.raises(ModelError, match="must begin at 15"):
        check_token_spaces({"a": first, "b": TokenSpace("b", 14, 2)}, 10, "config.json")
