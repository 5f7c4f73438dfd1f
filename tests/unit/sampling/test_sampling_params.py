"""Every bound of SamplingParams, on both sides; errors name the field."""

from __future__ import annotations

import copy
import enum
import fractions
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mvllm.errors import RequestError
from mvllm.messages.sampling_param_checks import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from mvllm.messages.sampling_params import MAX_BEAM_WIDTH, MAX_N, RequestOutputKind, SamplingParams, validate_for_model
from mvllm.messages.structured_outputs import StructuredOutputsParams

HUGE = 10**5000
"""An integer that Python refuses to convert to text."""

NEXT_AFTER_ONE = math.nextafter(1.0, 2.0)
NEXT_AFTER_TWO = math.nextafter(2.0, 3.0)
INT64_MAX = 2**63 - 1

ACCEPTED = [
    ("n", [1, MAX_N]),
    ("temperature", [0, 0.0, -0.0, 0.01, 1, 1e308]),
    ("top_p", [5e-324, 0.5, 1, 1.0]),
    ("top_k", [-1, 0, 1, INT64_MAX]),
    ("min_p", [0, 0.0, 0.5, 1, 1.0]),
    ("presence_penalty", [-2, -2.0, 0, 2, 2.0]),
    ("frequency_penalty", [-2, -2.0, 0, 2, 2.0]),
    ("repetition_penalty", [5e-324, 1, 2.0, 1e308]),
    ("seed", [None, -(2**63), -2, -1, 0, INT64_MAX]),
    ("stop", [None, "a", ["a"], ("a", "b"), [], ["x" * MAX_STOP_STRING_LENGTH], ["x"] * MAX_STOP_STRINGS, "\n", "é\0"]),
    ("stop_token_ids", [None, [], [0], [2**31 - 1], (1, 2), list(range(MAX_STOP_TOKEN_IDS))]),
    ("include_stop_str_in_output", [True, False]),
    ("ignore_eos", [True, False]),
    ("max_tokens", [None, 0, 1, INT64_MAX]),
    ("min_tokens", [0, 1, 16]),
    ("logprobs", [None, -1, 0, 1, INT64_MAX]),
    ("prompt_logprobs", [None, -1, 0, 1, INT64_MAX]),
    ("flat_logprobs", [True, False]),
    ("detokenize", [True, False]),
    ("skip_special_tokens", [True, False]),
    ("spaces_between_special_tokens", [True, False]),
    ("output_kind", [*RequestOutputKind, 0, 2]),
    ("structured_outputs", [None, StructuredOutputsParams(regex="a"), {"json_object": True}]),
    ("best_of", [None, 1, 2, MAX_N]),
    (
        "logit_bias",
        [None, {}, {5: 1}, {"5": -100.0, 6: 0}, dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0), {2**31 - 1: 1e308}],
    ),
    ("allowed_token_ids", [None, [0], (5, 3, 5), [2**31 - 1], list(range(200_000))]),
    ("bad_words", [None, [], ["a"], ("a", " b"), ["x" * MAX_BAD_WORD_LENGTH], ["x"] * MAX_BAD_WORDS, ["é\n"]]),
    ("bad_words_token_ids", [None, [], [[5]], ((5, 6), (7,))]),
    ("truncate_prompt_tokens", [None, -1, 1, INT64_MAX]),
    ("use_beam_search", [True, False]),
    ("beam_width", [None]),
    ("length_penalty", [1, 1.0]),
    ("early_stopping", [False]),
    ("extra_args", [None, {}, {"a": [1, {"b": None}], "c": 1.5, "d": "e", "f": True}]),
    ("thinking_token_budget", [None, 0, 500]),
    ("thinking_tags", [None, ["", "</think>"], ("<think>", "</think>", "So:</think>"), ["", ">", ">", "<call>"]]),
    ("thinking_tokens", [None, {"forced": [5]}, {"starts": [[1, 2], (3,)], "ends": [[4]], "forced": (4,)}]),
    ("logits_processors", [None, [], [max], (min, max)]),
    ("skip_reading_prefix_cache", [None, True, False]),
    ("guidance_scale", [None, 0, 1.0, 7.5, 1000]),
    ("negative_prompt", [None]),  # others need guidance_scale
    ("token_space", ["text", "image"]),
    ("forced_token_ids", [None, {0: 1}, {5: 0, 2: 2**31 - 1}]),
]

NO_NUMBER = ["1", b"1", [], [1], {}, 1j, object(), "", np.bool_(True), np.zeros(2)]
NO_FINITE_NUMBER = [math.nan, math.inf, -math.inf, HUGE, -HUGE, True, False, None, *NO_NUMBER]
NO_INT64 = [2**63, -(2**63) - 1, HUGE, -HUGE, 1.0, 1.5, math.nan, math.inf, True, False, *NO_NUMBER]
NO_BOOLEAN = [0, 1, 1.0, "true", None, [], object()]

REFUSED = [
    ("n", [0, -1, MAX_N + 1, 16384, None, *NO_INT64]),
    ("temperature", [-5e-324, -1, *NO_FINITE_NUMBER]),
    ("top_p", [0, 0.0, -0.1, NEXT_AFTER_ONE, 2, *NO_FINITE_NUMBER[:-1]]),
    ("top_k", [-2, None, *NO_INT64]),
    ("min_p", [-5e-324, NEXT_AFTER_ONE, 2, *NO_FINITE_NUMBER]),
    ("presence_penalty", [-NEXT_AFTER_TWO, NEXT_AFTER_TWO, 3, *NO_FINITE_NUMBER]),
    ("frequency_penalty", [-NEXT_AFTER_TWO, NEXT_AFTER_TWO, 3, *NO_FINITE_NUMBER]),
    ("repetition_penalty", [0, 0.0, -1.0, *NO_FINITE_NUMBER]),
    ("seed", NO_INT64),
    ("stop", ["", [""], ["a", ""], 1, [1], [None], [["a"]], b"a", [b"a"], {"a"}, {"a": 1}, object(), True]),
    ("stop", ["x" * (MAX_STOP_STRING_LENGTH + 1), ["x"] * (MAX_STOP_STRINGS + 1), "x" * 10**6, ["x"] * 10**5]),
    ("stop", ["\ud800", ["a", "b\udfff"]]),
    ("stop_token_ids", [1, "1", ["1"], [1.0], [True], [None], [-1], [2**31], [HUGE], {1}, {1: 1}, object()]),
    ("stop_token_ids", [list(range(MAX_STOP_TOKEN_IDS + 1)), [5] * 10**6]),
    ("include_stop_str_in_output", NO_BOOLEAN),
    ("ignore_eos", NO_BOOLEAN),
    ("max_tokens", [-1, *NO_INT64]),
    ("min_tokens", [-1, 17, INT64_MAX, None, *NO_INT64]),
    ("logprobs", [-2, *NO_INT64]),
    ("prompt_logprobs", [-2, *NO_INT64]),
    ("flat_logprobs", NO_BOOLEAN),
    ("detokenize", NO_BOOLEAN),
    ("skip_special_tokens", NO_BOOLEAN),
    ("spaces_between_special_tokens", NO_BOOLEAN),
    ("output_kind", [-1, 3, 1.0, True, None, "DELTA", HUGE, object()]),
    ("best_of", [0, -1, MAX_N + 1, *NO_INT64]),
    ("logit_bias", [[], "a", 5, {-1: 1}, {2**31: 1}, {"x": 1}, {"-1": 1}, {1.0: 1}, {True: 1}, {None: 1}, {HUGE: 1}]),
    (
        "logit_bias",
        [{5: math.nan}, {5: math.inf}, {5: HUGE}, {5: "1"}, {5: None}, {5: True}, {"9" * 5000: 1}, {"\u0665": 1}],
    ),
    ("logit_bias", [dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)]),
    ("allowed_token_ids", [[], 5, "5", [-1], [2**31], [1.0], [True], [None], [HUGE], {5}, {5: 1}, [5] * (2**20 + 1)]),
    ("bad_words", ["a", 5, [""], [" "], ["\n\t"], [5], [None], ["\ud800"], ["x"] * 10**5, ["x" * 10**6], {"a"}]),
    (
        "bad_words_token_ids",
        [[5], "5", [[]], [[-1]], [[2**31]], [[1.5]], [[5] * 10**6], [[5]] * 10**4, [["5"]], [[HUGE]]],
    ),
    ("truncate_prompt_tokens", [0, -2, *NO_INT64]),
    ("use_beam_search", NO_BOOLEAN),
    ("beam_width", [0, -1, 2, MAX_BEAM_WIDTH + 1, *NO_INT64]),
    ("length_penalty", [2.0, 0.0, -10.5, 10.5, *NO_FINITE_NUMBER]),
    ("early_stopping", [True, "never", "sometimes", 1, None, [], math.nan]),
    ("thinking_token_budget", [-1, 1.5, "5", True]),
    ("thinking_tags", [[], ["<think>"], ["<think>", ""], ["<", "x" * 300], ["<", ">", "x" * 5000], ["<", 5], "ab"]),
    ("thinking_tags", [["<", ">", ">", ""], ["<", ">", ">", "x" * 300], ["<"] * 9]),
    ("thinking_tokens", [{"implicit_ends": [[]]}, {"implicit_ends": [["a"]]}, {"implicit_ends": [[1] * 5000]}]),
    (
        "thinking_tokens",
        [5, {"forced": []}, {"starts": [[1]]}, {"forced": [-1]}, {"forced": [1], "ends": [[]]}, {"a": 1}],
    ),
    ("extra_args", [[], "a", 5, {5: 1}, {"a": object()}, {"a": HUGE}, {"a": "x" * 70_000}, {"a": 1j}]),
    ("logits_processors", ["a", 5, max, [5], ["a"], [None], [int], {"a": max}]),
    ("skip_reading_prefix_cache", [0, 1, 1.0, "true", []]),
    ("guidance_scale", [-0.1, 1000.1, math.nan, math.inf, "1", True, []]),
    ("negative_prompt", ["", "\ud800", 5, [], [-1], [1.5], ["a"], {}]),
    ("token_space", [None, "", 5, "x" * 65, []]),
    ("forced_token_ids", [[], "a", 5, {-1: 1}, {0: -1}, {0: 2**31}, {"x": 1}, {0: 1.5}, {True: 1}, {0: None}]),
    ("structured_outputs", ["a", 1, True, [], object()]),  # its own fields: tests/unit/structured_output
]


def cases(table: list[tuple[str, list[Any]]]) -> list[Any]:
    return [
        pytest.param(field, value, id=f"{field}-{number}")
        for number, (field, value) in enumerate((field, value) for field, values in table for value in values)
    ]


@pytest.mark.parametrize(("field", "value"), cases(ACCEPTED))
def test_valid_values_are_accepted(field, value):
    params = SamplingParams(**{field: value})
    assert SamplingParams(**msgspec.structs.asdict(params)) == params, "checking twice changes nothing"


@pytest.mark.parametrize(("field", "value"), cases(REFUSED))
def test_invalid_values_are_rejected_by_field(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.parameter == field
    assert str(caught.value).startswith(f"{field} must be ") and "; got " in str(caught.value)
    assert len(str(caught.value)) < 250 and str(caught.value).isascii()


def test_the_cases_cover_every_field():
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert {field for field, _ in ACCEPTED} == names == {field for field, _ in REFUSED}


def test_an_error_names_range_and_value():
    with pytest.raises(RequestError, match=r"^top_p must be a number > 0 and <= 1; got 1\.5$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(RequestError, match=r"^n must be an integer from 1 to 128; got 'many'$"):
        SamplingParams(n="many")
    with pytest.raises(RequestError, match=r"^max_tokens must be an integer >= 0 \(in 64 bits\); got -1$"):
        SamplingParams(max_tokens=-1)
    with pytest.raises(RequestError, match=r"^seed must be .*; got an integer of 16610 bits$"):
        SamplingParams(seed=HUGE)


def test_request_error_is_a_value_error():
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("seed", -1, None),
        ("top_k", -1, 0),
        ("stop", "end", ["end"]),
        ("stop", [], None),
        ("stop", ("a", "b"), ["a", "b"]),
        ("stop_token_ids", [], None),
        ("stop_token_ids", (3, 1, 3), [3, 1]),
        ("temperature", 0.001, 0.01),
        ("temperature", 5e-324, 0.01),
        ("temperature", 0.01, 0.01),
        ("temperature", -0.0, 0.0),
        ("temperature", 1, 1.0),
        ("top_p", np.float32(0.5), 0.5),
        ("top_k", np.int64(7), 7),
        ("min_p", fractions.Fraction(1, 4), 0.25),
        ("stop_token_ids", [np.int32(4)], [4]),
        ("output_kind", 1, RequestOutputKind.DELTA),
    ],
)
def test_values_are_normalized(field, given, kept):
    value = getattr(SamplingParams(**{field: given}), field)
    assert value == kept and type(value) is type(kept)
    assert math.copysign(1, value) == 1 if isinstance(value, float) else True


def test_stop_requires_detokenize():
    with pytest.raises(RequestError, match="detokenize") as caught:
        SamplingParams(stop="a", detokenize=False)
    assert caught.value.parameter == "stop"
    SamplingParams(stop=[], stop_token_ids=[1], detokenize=False)


def test_several_greedy_sequences_are_refused():
    with pytest.raises(RequestError, match="temperature is 0") as caught:
        SamplingParams(n=2, temperature=0)
    assert caught.value.parameter == "n"
    SamplingParams(n=2, temperature=1e-9)


def test_min_tokens_up_to_max_tokens():
    SamplingParams(min_tokens=5, max_tokens=5)
    SamplingParams(min_tokens=500, max_tokens=None)
    with pytest.raises(RequestError, match="max_tokens, which is 5") as caught:
        SamplingParams(min_tokens=6, max_tokens=5)
    assert caught.value.parameter == "min_tokens"


def test_copies_are_independent_and_checked():
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    twin = params.clone()
    assert twin == params == copy.copy(params) and twin is not params
    twin.stop.append("b")
    twin.stop_token_ids.append(2)
    assert (params.stop, params.stop_token_ids) == (["a"], [1])
    assert msgspec.structs.replace(params, temperature=1e-4).temperature == 0.01
    with pytest.raises(RequestError, match="top_p"):
        msgspec.structs.replace(params, top_p=0.0)


def test_the_callers_list_is_copied():
    mine = ["a"]
    params = SamplingParams(stop=mine)
    mine.append("")
    assert params.stop == ["a"]


def test_encoding_and_decoding_preserve_all_fields():
    params = SamplingParams(temperature=0.3, top_k=4, stop="x", stop_token_ids=[3], seed=-5, output_kind=2, logprobs=-1)
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("changes", [{"temperature": -1.0}, {"n": 500}, {"stop": [""]}, {"min_tokens": 99}])
def test_decoded_params_are_validated_again(changes):
    """A process that decodes a message validates it again."""
    message = msgspec.msgpack.encode(changes)
    with pytest.raises(msgspec.ValidationError, match=next(iter(changes))):
        msgspec.msgpack.decode(message, type=SamplingParams)


class Odd(enum.IntEnum):
    SEVEN = 7


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.decimals(),
    st.fractions(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.text(alphabet=st.characters(codec=None)),
    st.lists(st.integers()),
    st.lists(st.one_of(st.none(), st.booleans(), st.floats(), st.text(), st.integers(-(2**70), 2**70))),
    st.dictionaries(st.text(), st.integers()),
    st.sets(st.integers()),
    st.dates(),
    st.sampled_from([Odd.SEVEN, RequestOutputKind.DELTA, object(), int, HUGE, ..., NotImplemented, range(3)]),
    st.sampled_from(
        [np.int8(1), np.uint64(2**64 - 1), np.float16("nan"), np.float64("inf"), np.array(1), np.array([])]
    ),
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([field.name for field in msgspec.structs.fields(SamplingParams)]),
        ANYTHING,
        min_size=1,
        max_size=4,
    )
)
@example({"early_stopping": np.array([])})
def test_no_value_of_any_type_raises_anything_but_a_request_error(changes):
    try:
        params = SamplingParams(**changes)
    except RequestError as error:
        assert error.parameter in {*changes, "n", "min_tokens", "stop"}
        assert str(error).isascii()
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


# --- what depends on the model


def check(params: SamplingParams, **changes: int) -> SamplingParams:
    facts = {"vocab_size": 1000, "max_model_len": 100, "max_logprobs": 20, "prompt_len": 40}
    return validate_for_model(params, **{**facts, **changes})


def assert_refused(parameter: str, params: SamplingParams, **changes: int) -> str:
    with pytest.raises(RequestError) as caught:
        check(params, **changes)
    assert caught.value.parameter == parameter
    return str(caught.value)


def test_stop_tokens_must_be_in_the_vocabulary():
    check(SamplingParams(stop_token_ids=[0, 999]))
    assert "0 to 999" in assert_refused("stop_token_ids", SamplingParams(stop_token_ids=[3, 1000]))


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs_up_to_the_limit(field):
    def with_logprobs(count: int) -> SamplingParams:
        return SamplingParams(**{field: count})

    for count in (0, 20):
        check(with_logprobs(count))
    for count in (21, 1001, INT64_MAX, -1):
        message = assert_refused(field, with_logprobs(count))
        assert "from 0 to 20" in message and "max_logprobs" in message and message.endswith(str(count))


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("max_logprobs", [-1, 1000, 5000])
def test_logprobs_of_the_whole_vocabulary_if_max_logprobs_permits(field, max_logprobs):
    for count in (-1, 0, 1000):
        check(SamplingParams(**{field: count}), max_logprobs=max_logprobs)
    message = assert_refused(field, SamplingParams(**{field: 1001}), max_logprobs=max_logprobs)
    assert "from 0 to 1000" in message


def test_max_logprobs_zero_still_allows_the_sampled_token():
    check(SamplingParams(logprobs=0), max_logprobs=0)
    assert_refused("logprobs", SamplingParams(logprobs=1), max_logprobs=0)


def test_min_tokens_must_fit_in_the_context():
    check(SamplingParams(min_tokens=60, max_tokens=None))
    assert "0 to 60" in assert_refused("min_tokens", SamplingParams(min_tokens=61, max_tokens=None))
    assert_refused("min_tokens", SamplingParams(min_tokens=INT64_MAX, max_tokens=None))


@pytest.mark.parametrize(("asked", "settled"), [(None, 60), (60, 60), (61, 60), (INT64_MAX, 60), (59, 59), (1, 1)])
def test_max_tokens_is_limited_by_the_context(asked, settled):
    params = SamplingParams(max_tokens=asked)
    assert check(params).max_tokens == settled
    assert params.max_tokens == asked, "the params given are left as they are"


def test_a_prompt_must_leave_room_for_a_token():
    assert check(SamplingParams(max_tokens=None), prompt_len=99).max_tokens == 1
    for length in (100, 101, 10**9):
        assert "max_model_len" in assert_refused("prompt", SamplingParams(), prompt_len=length)


class TestBestOf:
    def test_is_between_n_and_the_limit(self):
        assert SamplingParams(n=3, best_of=3).num_sequences == 3
        assert SamplingParams(n=3, best_of=7).num_sequences == 7
        with pytest.raises(RequestError, match="best_of must be an integer from n, which is 3"):
            SamplingParams(n=3, best_of=2)

    def test_greedy_sequences_would_all_be_equal(self):
        with pytest.raises(RequestError, match="best_of must be 1 when temperature is 0"):
            SamplingParams(best_of=2, temperature=0)

    def test_only_a_best_of_above_n_is_ranked(self):
        assert not SamplingParams(n=2, best_of=2).is_ranked
        assert SamplingParams(n=2, best_of=3).is_ranked


class TestBeamSearch:
    def test_the_width_may_have_either_name(self):
        assert SamplingParams(use_beam_search=True, beam_width=4, n=2).num_beams == 4
        assert SamplingParams(use_beam_search=True, best_of=4, n=2, temperature=0).num_beams == 4
        assert SamplingParams(use_beam_search=True, n=2).num_beams == 2

    @pytest.mark.parametrize(
        ("field", "settings"),
        [
            ("beam_width", {"n": 3, "beam_width": 2}),
            ("best_of", {"best_of": 3, "beam_width": 2}),
            ("best_of", {"best_of": MAX_BEAM_WIDTH + 1}),
            ("n", {"n": MAX_BEAM_WIDTH + 1}),
            ("temperature", {"temperature": 0.7}),
            ("top_p", {"top_p": 0.9}),
            ("top_k", {"top_k": 5}),
            ("repetition_penalty", {"repetition_penalty": 1.1}),
            ("stop", {"stop": "x"}),
            ("logit_bias", {"logit_bias": {5: 1}}),
            ("structured_outputs", {"structured_outputs": {"regex": "a"}}),
            ("prompt_logprobs", {"prompt_logprobs": 1}),
        ],
    )
    def test_params_without_effect_are_rejected(self, field, settings):
        with pytest.raises(RequestError) as caught:
            SamplingParams(use_beam_search=True, **settings)
        assert caught.value.parameter == field

    @pytest.mark.parametrize("stopping", [True, False, "never"])
    @pytest.mark.parametrize("penalty", [-10, 0, 10])
    def test_all_ways_to_score_and_stop_are_accepted(self, stopping, penalty):
        params = SamplingParams(use_beam_search=True, beam_width=3, length_penalty=penalty, early_stopping=stopping)
        assert SamplingParams(**msgspec.structs.asdict(params)) == params


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {100: 1.0}),
        ("allowed_token_ids", [5, 100]),
        ("bad_words_token_ids", [[5], [6, 100]]),
        ("allowed_token_ids", [2**31 - 1]),
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused(field, value):
    with pytest.raises(RequestError, match="from 0 to 99") as caught:
        validate_for_model(
            SamplingParams(**{field: value}), vocab_size=100, max_model_len=64, max_logprobs=20, prompt_len=3
        )
    assert caught.value.parameter == field


def test_biases_are_clamped():
    assert SamplingParams(logit_bias={"5": 1e9, 6: -101, 7: 3}).logit_bias == {5: 100.0, 6: -100.0, 7: 3.0}


def test_num_entries_counts_lists_dicts_and_texts():
    assert SamplingParams().num_entries == 0
    settings = {
        "stop_token_ids": [1, 2],
        "logit_bias": {5: 1},
        "allowed_token_ids": [5, 6, 7],
        "bad_words_token_ids": [[5, 6], [7]],
        "bad_words": ["abc"],
        "stop": ["x" * 80],
    }
    assert SamplingParams(**settings).num_entries == 2 + 1 + 3 + 3 + 3 + 10
    assert SamplingParams(extra_args={"a": ["x" * 800]}).num_entries >= 100
