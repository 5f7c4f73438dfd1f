"""Compiling grammars, including hostile ones: each gives a grammar or a clear error, and the next one is compiled."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from mvllm import SamplingParams, StructuredOutputsParams
from mvllm.config.engine_args import EngineArgs
from mvllm.demo import demo_model_path
from mvllm.engine.core.grammars import load_vocabulary
from mvllm.messages.requests import EngineCoreRequest
from mvllm.structured_output import grammar_compiler as compiler_module
from mvllm.structured_output.grammar_compiler import CompiledGrammar, GrammarCache, make_compile_job
from mvllm.structured_output.sandbox import GrammarSandbox
from mvllm.structured_output.sandbox_main import CompileJob
from mvllm.structured_output.sequence_grammar import SequenceGrammar
from mvllm.structured_output.structured_output_manager import GrammarResult, StructuredOutputManager
from mvllm.structured_output.vocabulary import Vocabulary

PATIENCE = 240.0


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(EngineArgs(model=str(demo_model_path())).create_engine_config().model)


@pytest.fixture(scope="module")
def shared_manager(vocabulary: Vocabulary) -> Iterator[StructuredOutputManager]:
    """A shared manager for tests that do not change it; its process is started once."""
    manager = StructuredOutputManager(lambda: vocabulary)
    yield manager
    manager.shutdown()


@pytest.fixture
def manager(vocabulary: Vocabulary) -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(lambda: vocabulary)
    yield manager
    manager.shutdown()


def request(name: str = "request", eos: list[int] | None = None, **fields: object) -> EngineCoreRequest:
    settings = {name: fields.pop(name) for name in ("min_tokens", "ignore_eos", "stop_token_ids") if name in fields}
    wish = StructuredOutputsParams(**fields)
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[5],
        sampling_params=SamplingParams(structured_outputs=wish, max_tokens=99, **settings),
        eos_token_ids=[1] if eos is None else eos,
    )


def outcomes(manager: StructuredOutputManager, number: int) -> dict[str, GrammarResult]:
    found: dict[str, GrammarResult] = {}
    deadline = time.monotonic() + PATIENCE
    while len(found) < number:
        assert time.monotonic() < deadline
        manager.wait(0.1)
        found |= {outcome.request_id: outcome for outcome in manager.pop_results()}
    return found


def begin(manager: StructuredOutputManager, **fields: object) -> SequenceGrammar:
    manager.submit(request(**fields))
    outcome = outcomes(manager, 1)["request"]
    assert outcome.grammar is not None, outcome.error
    return outcome.grammar


def allowed(grammar: SequenceGrammar) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(grammar.mask, np.uint8), bitorder="little")).tolist())


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.build().tokenize_str(text)


HOSTILE: dict[str, dict[str, object]] = {
    "unknown type": {"json": {"type": "strng"}},
    "false": {"json": "false"},
    "bad pattern": {"json": {"type": "string", "pattern": "(["}},
    "cycle": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    "remote": {"json": {"$ref": "http://localhost/schema"}},
    "contradiction": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    "divisor": {"json": {"type": "integer", "multipleOf": 999983}},
    "huge range": {"json": {"type": "integer", "minimum": -(10**40), "maximum": 1e300}},
    "many enums": {"json": {"enum": [f"{i}" for i in range(25_000)]}},
    "exponential": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(10)]}
    },
    "squared counts": {"regex": "((a{0,1000}){0,1000})"},
    "backtracking": {"regex": "(a+)+$"},
    "look-ahead": {"regex": "(?=a)b"},
    "back-reference": {"regex": r"(a)\1"},
    "impossible": {"regex": r"[^\s\S]"},
    "parentheses": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "no rule": {"grammar": "???"},
    "left recursion": {"grammar": "start: start"},
    "left recursion, EBNF": {"grammar": "root ::= root"},
    "mutual recursion": {"grammar": "start: a\na: b\nb: a"},
    "undefined": {"grammar": "start: foo"},
    "deep EBNF": {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "deep Lark": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
}
MAY_SUCCEED = {"backtracking", "squared counts", "many enums", "huge range", "exponential"}


def test_hostile_grammars_end_in_clear_errors_and_the_next_request_is_served(manager: StructuredOutputManager) -> None:
    for name, fields in HOSTILE.items():
        manager.submit(request(name, **fields))
    manager.submit(request("good", regex="ab"))
    found = outcomes(manager, len(HOSTILE) + 1)
    assert found["good"].grammar is not None
    for name in HOSTILE:
        if name not in MAY_SUCCEED:
            error = found[name].error
            assert error is not None and "structured_outputs" in error, name
            assert len(error) < 600 and "\n" not in error, error
    assert "takes more than" in str(found["divisor"].error)
    assert len(manager.sandbox_pids) <= 2


def test_a_failed_part_of_a_schema_is_named(manager: StructuredOutputManager) -> None:
    part = {"type": "object", "properties": {"q": {"anyOf": [{"type": "null"}, {"type": "strng"}]}}}
    manager.submit(request(json={"type": "array", "items": part}))
    assert "#/items/properties/q/anyOf/1" in str(outcomes(manager, 1)["request"].error)


def test_memory_stays_bounded_over_many_schemas(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "CACHE_ENTRIES", 16)
    begin(manager, regex="warm up")
    for i in range(150):
        manager.submit(request(f"{i}", json={"type": "object", "properties": {f"name {i}": {"type": "integer"}}}))
    assert all(outcome.grammar is not None for outcome in outcomes(manager, 150).values())
    assert len(manager._cache) <= 16
    gc.collect()
    before = psutil.Process().memory_info().rss
    for i in range(150):
        manager.submit(request(f"{i}", json={"type": "object", "properties": {f"other {i}": {"type": "integer"}}}))
    outcomes(manager, 150)
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 32 << 20


def test_the_cache_evicts_least_recently_used_grammars_and_counts_bytes() -> None:
    cache, jobs = GrammarCache(), [CompileJob("regex", str(i)) for i in range(3)]
    for job in jobs[:2]:
        cache.put(job, CompiledGrammar(None, [], compiler_module.CACHE_BYTES // 2 - 100))
    assert cache.get(jobs[0]) is not None
    cache.put(jobs[2], CompiledGrammar(None, [], 1000))
    assert cache.get(jobs[1]) is None and cache.get(jobs[0]) is not None and cache.get(jobs[2]) is not None
    assert cache.memory <= compiler_module.CACHE_BYTES


def test_cancelled_requests_are_dropped_and_equal_grammars_are_compiled_once(
    manager: StructuredOutputManager,
) -> None:
    for name in ("first", "second", "third"):
        manager.submit(request(name, json={"type": "object"}))
    manager.cancel(["second"])
    assert set(outcomes(manager, 2)) == {"first", "third"}
    manager.submit(request("fourth", json_object=True))  # the same grammar with another name
    assert {outcome.request_id for outcome in manager.pop_results()} == {"fourth"}


def test_a_process_that_is_killed_is_started_again(vocabulary: Vocabulary) -> None:
    sandbox = GrammarSandbox(vocabulary)
    job = make_compile_job(StructuredOutputsParams(regex="ab"))
    try:
        assert sandbox.run(job).error is None
        assert sandbox.pid is not None
        os.kill(sandbox.pid, signal.SIGKILL)
        assert sandbox.run(job).error is None
        os.kill(sandbox.pid, signal.SIGSEGV)
        deadline = time.monotonic() + PATIENCE
        while psutil.Process(sandbox.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sandbox.run(job).error is None
    finally:
        sandbox.close()
    assert sandbox.pid is None and sandbox.run(job).error == "the engine is shutting down"


def test_masks_allow_the_text_and_eos_only_where_it_is_complete(
    manager: StructuredOutputManager, vocabulary: Vocabulary
) -> None:
    grammar = begin(manager, json={"enum": ["ja", "jawohl"]})
    for token in tokens_of(vocabulary, '"ja'):
        assert 1 not in allowed(grammar) and token in allowed(grammar)
        grammar.accept(token)
    (quote,) = tokens_of(vocabulary, '"')
    assert quote in allowed(grammar)
    grammar.accept(quote)
    assert allowed(grammar) == {1} and not grammar.is_complete
    grammar.accept(1)
    assert grammar.is_complete and grammar.error is None


def test_tokens_that_end_a_sequence_wait_for_complete_text_and_for_min_tokens(
    manager: StructuredOutputManager, vocabulary: Vocabulary
) -> None:
    a, b = tokens_of(vocabulary, "a")[0], tokens_of(vocabulary, "b")[0]
    grammar = begin(manager, regex="a[0-9]", min_tokens=2, stop_token_ids=[a])
    assert allowed(grammar) == {a}  # all possible beginnings of the text, although it ends the sequence
    grammar = begin(manager, regex="[ab]+", min_tokens=2, stop_token_ids=[a])
    assert a not in allowed(grammar)
    grammar.accept(b)
    assert 1 not in allowed(grammar) and a not in allowed(grammar)
    grammar.accept(b)
    assert {1, a, b} <= allowed(grammar)


def test_a_complete_text_ends_even_with_ignore_eos_and_min_tokens(
    manager: StructuredOutputManager, vocabulary: Vocabulary
) -> None:
    (a,) = tokens_of(vocabulary, "a")
    for settings in ({"ignore_eos": True}, {"min_tokens": 50}, {"eos": []}):
        grammar = begin(manager, regex="a", **settings)
        assert allowed(grammar) == {a}
        grammar.accept(a)
        assert allowed(grammar) and allowed(grammar) <= set(vocabulary.end_ids)
        grammar.accept(min(allowed(grammar)))
        assert grammar.is_complete


def test_a_token_outside_of_the_grammar_is_an_error(manager: StructuredOutputManager, vocabulary: Vocabulary) -> None:
    grammar = begin(manager, choice=["yes"])
    grammar.accept(tokens_of(vocabulary, "n")[0])
    assert grammar.error is not None and not grammar.is_complete


def test_sequences_of_one_grammar_do_not_share_state(manager: StructuredOutputManager, vocabulary: Vocabulary) -> None:
    first, second = begin(manager, regex="a[0-9]"), begin(manager, regex="a[0-9]")
    before = second.mask
    first.accept(tokens_of(vocabulary, "a")[0])
    assert second.mask == before != first.mask


def test_choices_may_contain_any_text(manager: StructuredOutputManager, vocabulary: Vocabulary) -> None:
    texts = ['say "hi"', "back\\slash", "line\nbreak", "é😀", "a.b*", "\x01"]
    for text in texts:
        grammar = begin(manager, choice=texts)
        for token in tokens_of(vocabulary, text):
            assert token in allowed(grammar), text
            grammar.accept(token)
        assert 1 in allowed(grammar)


class TestReasoning:
    """Reasoning up to its end tag, and the grammar after it."""

    def consume(self, grammar: SequenceGrammar, vocabulary: Vocabulary, text: str) -> bool:
        """Consumes a text; false if one of its tokens is blocked."""
        for token in tokens_of(vocabulary, text):
            if token not in allowed(grammar):
                return False
            grammar.accept(token)
            assert grammar.error is None
        return True

    @pytest.mark.parametrize("form", [{"json": {"enum": [7]}}, {"regex": "7"}, {"choice": ["7"]}], ids=str)
    @pytest.mark.parametrize("before", ["hm</think>", "</think>\n\n", "<think>a </thin b\n\n{</think> ", "é😀</think>"])
    def test_output_that_begins_inside_the_reasoning(
        self, shared_manager: StructuredOutputManager, vocabulary: Vocabulary, form: dict[str, object], before: str
    ) -> None:
        grammar = begin(shared_manager, **form, thoughts_end="</think>")
        assert self.consume(grammar, vocabulary, before) and 1 not in allowed(grammar)
        assert not self.consume(grammar, vocabulary, "8")
        assert self.consume(grammar, vocabulary, "7") and allowed(grammar) == {1}

    @pytest.mark.parametrize("form", [{"json": {"enum": [7]}}, {"regex": "7"}, {"grammar": 'start: "7"'}], ids=str)
    def test_optional_reasoning_with_an_opening_tag(
        self, shared_manager: StructuredOutputManager, vocabulary: Vocabulary, form: dict[str, object]
    ) -> None:
        for before in ("", "<think>so: 8</think>\n\n", "<think></think>"):
            grammar = begin(shared_manager, **form, thoughts_start="<think>", thoughts_end="</think>")
            assert self.consume(grammar, vocabulary, before)
            assert not self.consume(grammar, vocabulary, "8")
            assert self.consume(grammar, vocabulary, "7") and allowed(grammar) == {1}
        assert not self.consume(
            begin(shared_manager, **form, thoughts_start="<think>", thoughts_end="</think>"), vocabulary, "hm"
        )

    def test_reasoning_that_ends_with_a_special_token_without_text(
        self, shared_manager: StructuredOutputManager, vocabulary: Vocabulary
    ) -> None:
        tokenizer = vocabulary.build()
        special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special_token(i) and i not in (0, 1)]
        [tag] = [i for i in special if tokenizer.decode_str([i]) == "<|im_start|>"]
        grammar = begin(shared_manager, regex="7", thoughts_end="<|im_start|>")
        assert self.consume(grammar, vocabulary, "hm 8") and tag in allowed(grammar)
        grammar.accept(tag)
        assert not self.consume(grammar, vocabulary, "8") and self.consume(grammar, vocabulary, "7")

    def test_reasoning_between_tags_of_special_tokens_and_texts(
        self, shared_manager: StructuredOutputManager, vocabulary: Vocabulary
    ) -> None:
        """As in the channels of gpt-oss and Gemma 4."""
        tokenizer = vocabulary.build()
        special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special_token(i) and i not in (0, 1)]
        [tag] = [i for i in special if tokenizer.decode_str([i]) == "<|im_start|>"]
        tags = {"thoughts_start": "<|im_start|>thought\n", "thoughts_end": "<|im_start|>final<|im_start|>"}
        grammar = begin(shared_manager, regex="7", **tags)
        assert allowed(grammar) > {tag}
        for text in ("thought\n", "hm 8", "final"):
            if text != "hm 8":
                grammar.accept(tag)
            assert self.consume(grammar, vocabulary, text)
        grammar.accept(tag)
        assert not self.consume(grammar, vocabulary, "8") and self.consume(grammar, vocabulary, "7")

    def test_an_impossible_grammar_is_refused_although_its_reasoning_part_could_match(
        self, shared_manager: StructuredOutputManager
    ) -> None:
        shared_manager.submit(
            request(json={"allOf": [{"type": "string"}, {"type": "integer"}]}, thoughts_end="</think>")
        )
        assert outcomes(shared_manager, 1)["request"].grammar is None


NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FLAG = {"type": "object", "properties": {"y": {"type": "boolean"}}, "required": ["y"]}
TAGS = {
    "structures": [
        {"begin": "<fun=a>", "schema": NUMBER, "end": "</fun>"},
        {"begin": "<fun=b>", "schema": FLAG, "end": "</fun>"},
        {"begin": "[T]", "schema": NUMBER, "end": ""},
    ],
    "triggers": ["<fun", "[T]"],
}


class TestStructuralTags:
    """Free text, and JSON of a schema after each trigger."""

    @pytest.mark.parametrize(
        "text",
        [
            "plain text, <fu and [ too",
            'say <fun=a>{"x": 5}</fun> and more',
            '<fun=b>{"y": true}</fun><fun=a>{"x":1}</fun>',
            '[T]{"x": 1} more [T]{"x":2}',
        ],
    )
    def test_allowed_texts(self, shared_manager: StructuredOutputManager, vocabulary: Vocabulary, text: str) -> None:
        grammar = begin(shared_manager, structural_tag=TAGS)
        for token in tokens_of(vocabulary, text):
            assert token in allowed(grammar)
            grammar.accept(token)
        assert 1 in allowed(grammar) and grammar.error is None

    @pytest.mark.parametrize(
        ("text", "allows"),
        [
            ('<fun=a>{"', "x"),
            ("<fun=", "ab"),
            ("<fun", "="),
            ('ah [T]{"x": 5} <fun=b>{"', "y"),
            ('<fun=a>{"x": 5}</fun', ">"),
        ],
    )
    def test_the_characters_allowed_inside_a_structure(
        self, shared_manager: StructuredOutputManager, vocabulary: Vocabulary, text: str, allows: str
    ) -> None:
        grammar = begin(shared_manager, structural_tag=TAGS)
        for token in tokens_of(vocabulary, text):
            assert token in allowed(grammar)
            grammar.accept(token)
        tokenizer = vocabulary.build()
        assert {tokenizer.decode_str([token])[0] for token in allowed(grammar)} == set(allows)

    def test_a_trigger_that_is_a_special_token_without_text(
        self, shared_manager: StructuredOutputManager, vocabulary: Vocabulary
    ) -> None:
        tag = {"begin": "<|im_start|>f", "schema": {"enum": [7]}, "end": ""}
        grammar = begin(shared_manager, structural_tag={"structures": [tag], "triggers": ["<|im_start|>"]})
        [special] = vocabulary.build().tokenize_str("<|im_start|>", parse_special=True)
        assert special in allowed(grammar) and 1 in allowed(grammar)
        grammar.accept(special)
        for token in tokens_of(vocabulary, "f7"):
            assert {token} == allowed(grammar)
            grammar.accept(token)
        assert special in allowed(grammar) and 1 in allowed(grammar)

    def test_an_unsatisfiable_schema_is_refused(self, shared_manager: StructuredOutputManager) -> None:
        tag = {"begin": "<f>", "schema": {"type": "strng"}, "end": ""}
        shared_manager.submit(request(structural_tag={"structures": [tag], "triggers": ["<"]}))
        assert "structural tag" in str(outcomes(shared_manager, 1)["request"].error)


def test_a_grammar_beyond_the_parser_limits_is_refused_when_compiled(shared_manager: StructuredOutputManager) -> None:
    shared_manager.submit(request("wide", json={"enum": [{"id": i, "name": f"n{i}"} for i in range(4000)]}))
    shared_manager.submit(request("narrow", json={"anyOf": [{"properties": {"k": {"const": i}}} for i in range(300)]}))
    found = outcomes(shared_manager, 2)
    assert "items" in str(found["wide"].error) and found["narrow"].error is None
