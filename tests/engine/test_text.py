"""Text outputs of a whole engine: streamed or complete, and cut at stop strings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mvllm import LLM, SamplingParams
from mvllm.entrypoints.step_loop import stream_request
from mvllm.logprobs import FlatLogprobs
from mvllm.messages.sampling_params import RequestOutputKind
from tests.engine.conftest import MakeLLM
from tests.unit.engine.tokenizers import KINDS, make_tokenizer, save_tokenizer

PROMPTS = ["Hello world", "The capital of", [5, 6, 7, 8], "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm()


def test_text_equals_the_detokenized_tokens(llm: LLM) -> None:
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
        sequence = output.outputs[0]
        assert sequence.text == llm.get_tokenizer().decode(sequence.token_ids, skip_special_tokens=True)


def test_streamed_deltas_add_up_to_the_complete_text(llm: LLM) -> None:
    for prompt, whole in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
        pieces = [sequence for output in stream_request(llm.llm_engine, prompt, GREEDY) for sequence in output.outputs]
        assert len(pieces) > 1
        assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
        assert [i for piece in pieces for i in piece.token_ids] == whole.outputs[0].token_ids


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_stop_string_cuts_the_text_where_it_first_occurs(llm: LLM, kind: RequestOutputKind) -> None:
    (whole,) = llm.generate(["Hello world"], GREEDY, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    engine = llm.llm_engine
    engine.add_request("r", "Hello world", msgspec.structs.replace(GREEDY, stop=stop, output_kind=kind))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    last = outputs[-1].outputs[0]
    shown = "".join(o.outputs[0].text for o in outputs) if kind == RequestOutputKind.DELTA else last.text
    assert shown == text[: text.index(stop)]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert engine.reset_prefix_cache()  # the core aborted the request: no block is in use


def test_closing_a_stream_early_aborts_the_request(llm: LLM) -> None:
    for _ in stream_request(llm.llm_engine, "Hello world", GREEDY):
        break
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.reset_prefix_cache()


def test_the_eos_token_is_in_the_token_ids_but_not_in_the_text(llm: LLM) -> None:
    (whole,) = llm.generate(["Hello world"], GREEDY, use_tqdm=False)
    tokens = whole.outputs[0].token_ids
    end = next(t for t in tokens[5:] if t not in tokens[:5])
    params = msgspec.structs.replace(GREEDY, stop_token_ids=[end])
    (output,) = llm.generate(["Hello world"], params, use_tqdm=False)
    sequence = output.outputs[0]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", end)
    assert sequence.token_ids == tokens[: tokens.index(end) + 1]
    assert sequence.text == llm.get_tokenizer().decode(sequence.token_ids[:-1], skip_special_tokens=True)


def test_logprobs_and_prompt_logprobs_have_one_entry_per_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate(["The capital of"], params, use_tqdm=False)
    sequence = output.outputs[0]
    assert output.prompt_logprobs is not None and sequence.logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None and token in entry and 1 <= len(entry) <= 2
    for token, entry in zip(sequence.token_ids, sequence.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert entry[token].rank == 1
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token])


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1.0, "seed": 5}, {"best_of": 3, "temperature": 1.0}])
def test_flat_logprobs_read_as_the_dicts_that_they_replace(llm: LLM, more: dict[str, Any]) -> None:
    params = SamplingParams(
        **{"temperature": 0, "max_tokens": 5, "logprobs": 2, "prompt_logprobs": 1, "seed": 1, **more}
    )
    (dicts,) = llm.generate(["The capital of"], params, use_tqdm=False)
    flat_params = msgspec.structs.replace(params, flat_logprobs=True)
    (flat,) = llm.generate(["The capital of"], flat_params, use_tqdm=False)
    assert isinstance(flat.prompt_logprobs, FlatLogprobs) and dicts.prompt_logprobs is not None
    assert list(flat.prompt_logprobs) == [{}, *dicts.prompt_logprobs[1:]]
    for one, other in zip(dicts.outputs, flat.outputs, strict=True):
        found = other.logprobs
        assert isinstance(found, FlatLogprobs) and list(found) == one.logprobs and other.text == one.text
        assert found[-1] == one.logprobs[-1] and list(found[1:3]) == one.logprobs[1:3] and not found[5:]
        assert len(found.token_ids) == len(found.logprobs) == found.end_indices[-1]


@pytest.mark.parametrize(
    "kind",
    [
        "byte_fallback",
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS if kind != "byte_fallback"),
    ],
)
def test_the_text_is_what_follows_that_of_the_prompt(make_llm: MakeLLM, tmp_path: Path, kind: str) -> None:
    """As in the text of prompt and output together, with every kind of decoder."""
    save_tokenizer(tmp_path, kind)
    llm = make_llm(tokenizer=str(tmp_path), load_format="dummy", hf_overrides={"vocab_size": 512})
    decode = partial(llm.get_tokenizer().decode, clean_up_tokenization_spaces=False)
    prompts = ["Hello world", "def f(x):\n    return", "The cat sat on", [5, 6, 7, 8]]
    # Tokens of whole characters: the text of a run of bytes is known at its end.
    known = [i for i in range(make_tokenizer(kind).length) if "\ufffd" not in make_tokenizer(kind).token_text(i)]
    greedy = msgspec.structs.replace(GREEDY, allowed_token_ids=known)
    settings = [
        greedy,
        msgspec.structs.replace(greedy, skip_special_tokens=False),
        msgspec.structs.replace(greedy, n=2, temperature=1.0, seed=1),
        msgspec.structs.replace(greedy, stop=["never occurs"]),
        msgspec.structs.replace(GREEDY, use_beam_search=True, beam_width=2, n=2, max_tokens=4),
    ]
    for params in settings:
        for output in llm.generate(prompts, params, use_tqdm=False):
            for sequence in output.outputs:
                options = {"skip_special_tokens": params.skip_special_tokens}
                before = decode(output.prompt_token_ids, **options)
                whole = decode([*output.prompt_token_ids, *sequence.token_ids], **options)
                if "\ufffd" not in whole:
                    assert before + sequence.text == whole
