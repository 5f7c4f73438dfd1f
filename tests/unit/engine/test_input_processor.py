"""InputProcessor: accepted and rejected requests, and the engine-core requests that it creates."""

from __future__ import annotations

import numpy as np
import pytest

from mvllm import RequestError, SamplingParams
from mvllm.engine.frontend import request_checks
from mvllm.engine.frontend.input_processor import InputProcessor
from tests.unit.engine.builders import make_config
from tests.unit.engine.tokenizers import make_tokenizer


def make_processor(*, tokenizer=True, **config):
    return InputProcessor(make_config(**config), make_tokenizer() if tokenizer else None)


def process(prompt, params=None, processor=None, **kwargs):
    return (processor or make_processor()).process("r", prompt, params, **kwargs)


def refusal(prompt, params=None, processor=None, **kwargs):
    with pytest.raises(RequestError) as caught:
        process(prompt, params, processor, **kwargs)
    return caught.value


def test_text_is_tokenized():
    request = process("Hello world")
    assert request.prompt == "Hello world"
    assert request.core.prompt_token_ids == make_tokenizer().encode("Hello world")


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3]),
        [np.int32(1), 2, 3],
        {"prompt_token_ids": [1, 2, 3]},
    ],
)
def test_token_ids_are_used_unchanged(prompt):
    request = process(prompt)
    assert request.core.prompt_token_ids == [1, 2, 3]
    assert all(type(i) is int for i in request.core.prompt_token_ids)
    assert request.prompt is None


def test_a_text_that_is_much_too_long_is_not_tokenized(monkeypatch):
    monkeypatch.setattr(type(make_tokenizer()), "encode_batch", None)
    assert "has at least" in str(refusal("x" * 10_000_000))
    with pytest.raises(RequestError, match="Prompt 1 of 2: The prompt has at least"):
        make_processor().process_batch(["a", "b"], ["x", "x" * 10_000_000], [None, None])


def test_a_text_in_too_many_pieces_is_not_tokenized(monkeypatch):
    made = make_tokenizer()
    found = process({"prompt": "the |cat", "cut_at": "|"})
    assert found.prompt == "the cat" and found.core.prompt_token_ids == made.encode_pieces(["the ", "cat"])
    monkeypatch.setattr(type(made), "encode_batch", None)
    assert "has at least 5000 tokens" in str(refusal({"prompt": "|x" * 5000, "cut_at": "|"}))


def test_a_lone_surrogate_is_rejected_at_any_position():
    text = "é" * (1 << 20) + "a" * 77 + "\udc00"
    assert f"character {(1 << 20) + 77} is a lone surrogate U+DC00" in str(refusal(text))


def test_text_beside_token_ids_is_only_echoed():
    request = process({"prompt": "anything", "prompt_token_ids": [4, 5]})
    assert (request.prompt, request.core.prompt_token_ids) == ("anything", [4, 5])


def test_the_callers_list_is_not_kept():
    ids = [1, 2, 3]
    request = process(ids)
    ids.append(4)
    assert request.core.prompt_token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (3.5, "found 3.5"),
        (None, "found None"),
        (b"bytes", "type bytes"),
        ({"promt": "x"}, "Did you mean 'prompt'"),
        ({}, "found neither"),
        ({"prompt": 5}, "must be a text; found 5"),
        ({"prompt_token_ids": "12"}, "found '12'"),
        ([], "empty"),
        ("", "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([1, True, 2], "found True at position 1"),
        ([1, 2.0], "found 2.0 at position 1"),
        (np.array([1.0, 2.0]), "found 1.0 at position 0"),
        ([1, -1], "found -1 at position 1"),
        ([1, 500], "found 500 at position 1"),
        ([2**80], "81 bits"),
        ([1, "x"], "found 'x' at position 1"),
        ([[1, 2]], "a list of"),
        ("a\ud800b", "character 1 is a lone surrogate U+D800"),
    ],
)
def test_an_invalid_prompt_is_rejected_with_the_value_found(prompt, words):
    error = refusal(prompt)
    assert words in str(error)
    assert error.parameter == "prompt"


def test_token_ids_must_be_below_the_vocabulary_size():
    assert process([0, 499]).core.prompt_token_ids == [0, 499]


def test_a_prompt_that_leaves_room_for_one_token_passes():
    processor = make_processor(max_model_len=8)
    request = process([1] * 7, SamplingParams(max_tokens=None), processor)
    assert request.core.sampling_params.max_tokens == 1


@pytest.mark.parametrize("length", [8, 9])
def test_a_too_long_prompt_is_refused_with_both_numbers(length):
    error = refusal([1] * length, None, make_processor(max_model_len=8))
    assert f"{length} tokens" in str(error)
    assert "8 (max_model_len)" in str(error)


def test_max_tokens_none_is_the_rest_of_the_context():
    request = process([1] * 10, SamplingParams(max_tokens=None), make_processor(max_model_len=64))
    assert request.core.sampling_params.max_tokens == 54


def test_settings_that_the_model_does_not_support_are_refused():
    assert refusal([1], SamplingParams(stop_token_ids=[500])).parameter == "stop_token_ids"
    assert refusal([1], SamplingParams(logprobs=21)).parameter == "logprobs"


def test_params_are_validated_again_on_arrival():
    params = SamplingParams()
    params.temperature = float("nan")
    assert refusal([1], params).parameter == "temperature"


def test_params_changed_after_arrival_have_no_effect():
    params = SamplingParams(temperature=0.5)
    request = process([1], params)
    params.temperature = 0.7
    assert request.core.sampling_params.temperature == request.params.temperature == 0.5


def test_a_length_is_refused_before_the_tokens_are_read():
    assert "999999998 tokens" in str(refusal({"prompt_token_ids": range(2, 10**9)}))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), "now", True])
def test_an_arrival_time_is_a_number_of_seconds(seconds):
    assert refusal([1], arrival_time=seconds).parameter == "arrival_time"


def test_settings_of_another_type_are_refused():
    assert refusal([1], {"temperature": 0}).parameter == "sampling_params"


def test_no_settings_means_the_models_defaults():
    processor = make_processor(generation_defaults={"temperature": 0.25, "top_k": 7})
    params = process([1], None, processor).core.sampling_params
    assert (params.temperature, params.top_k) == (0.25, 7)


def test_end_tokens_come_from_the_model_and_the_tokenizer():
    processor = make_processor(eos_token_ids=(9,))
    assert process([1], None, processor).core.eos_token_ids == [9, make_tokenizer().eos_token_id]


class TestCacheSalt:
    def test_it_reaches_the_core(self):
        assert process({"prompt": "x", "cache_salt": "mine"}).core.cache_salt == "mine"

    @pytest.mark.parametrize("salt", ["", "x" * 257, 5, "a\nb"])
    def test_invalid_values_are_refused(self, salt):
        assert refusal({"prompt": "x", "cache_salt": salt}).parameter == "cache_salt"

    def test_the_longest_passes(self):
        assert process({"prompt": "x", "cache_salt": "x" * 256}).core.cache_salt == "x" * 256


class TestWithoutTokenizer:
    def test_token_ids_pass(self):
        assert process([1, 2], None, make_processor(tokenizer=False)).core.prompt_token_ids == [1, 2]

    def test_text_is_refused(self):
        assert "skip_tokenizer_init" in str(refusal("x", None, make_processor(tokenizer=False)))

    def test_stop_strings_are_refused(self):
        error = refusal([1], SamplingParams(stop="x"), make_processor(tokenizer=False))
        assert error.parameter == "stop"


class TestPriority:
    def test_without_the_policy_it_is_ignored_and_logged_once(self, caplog):
        request_checks._warn_of_ignored_priority.cache_clear()
        processor = make_processor()
        assert [process([1], None, processor, priority=priority).core.priority for priority in (3, -2)] == [0, 0]
        [line] = [record.getMessage() for record in caplog.records]
        assert "scheduling_policy='priority'" in line

    def test_it_reaches_the_core(self):
        assert process([1], None, make_processor(policy="priority"), priority=-3).core.priority == -3

    @pytest.mark.parametrize("priority", [True, 1.5, "1", 2**40])
    def test_invalid_values_are_refused(self, priority):
        assert refusal([1], None, make_processor(policy="priority"), priority=priority).parameter == "priority"


def test_the_error_has_the_position_of_the_invalid_prompt():
    with pytest.raises(RequestError, match="Prompt 1 of 3"):
        make_processor().process_batch(["a", "b", "c"], ["x", [-1], "y"], [None] * 3)


def test_the_error_has_the_position_of_the_empty_text():
    with pytest.raises(RequestError, match=r"Prompt 2 of 3: The prompt is empty"):
        make_processor().process_batch(["a", "b", "c"], ["x", [1], ""], [None] * 3)


def test_a_request_id_that_cannot_be_encoded_is_rejected():
    with pytest.raises(RequestError, match="request_id must be valid Unicode") as caught:
        make_processor().process("a\ud800", "Hello")
    assert caught.value.parameter == "request_id"


def test_settings_for_many_prompts_are_validated_once_and_copied(monkeypatch):
    processor = make_processor()
    looked = []
    real = InputProcessor._bad_words
    monkeypatch.setattr(InputProcessor, "_bad_words", lambda self, words: looked.append(words) or real(self, words))
    params = SamplingParams(bad_words=["a"], max_tokens=10**6)
    made = processor.process_batch(["a", "b", "c"], [[5], [5, 6], [7]], [params] * 3)
    assert len(looked) == 1 and params.bad_words_token_ids is None
    assert len({tuple(each.params.bad_words_token_ids[0]) for each in made}) == 1
    room = processor._model.max_model_len
    assert [each.params.max_tokens for each in made] == [room - 1, room - 2, room - 1]


def test_bad_words_as_texts_and_as_ids_share_one_limit():
    params = SamplingParams(bad_words=["a"], bad_words_token_ids=[[i % 50, 5] for i in range(512)])
    with pytest.raises(RequestError, match="bad_words_token_ids must be a list of at most 512"):
        process([5], params)


def test_kv_transfer_params_go_to_the_engine_core_and_not_to_workers():
    params = SamplingParams(extra_args={"kv_transfer_params": {"do_remote_decode": True}, "other": 1})
    processor = make_processor()
    for request in processor.process_batch(["a", "b"], [[1], [2]], [params, params]):
        assert request.core.kv_transfer_params == {"do_remote_decode": True}
        assert request.core.sampling_params.extra_args == {"other": 1}
    assert params.extra_args == {"kv_transfer_params": {"do_remote_decode": True}, "other": 1}
    alone = process([1], SamplingParams(extra_args={"kv_transfer_params": {"a": 1}}))
    assert (alone.core.kv_transfer_params, alone.core.sampling_params.extra_args) == ({"a": 1}, None)
    assert process([1], SamplingParams()).core.kv_transfer_params is None


def test_kv_transfer_params_are_an_object():
    error = refusal([1], SamplingParams(extra_args={"kv_transfer_params": "http://elsewhere"}))
    assert error.parameter == "kv_transfer_params"
    assert "kv_transfer_params must be an object" in str(error)
