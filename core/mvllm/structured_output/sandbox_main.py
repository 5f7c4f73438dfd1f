"""Program that compiles grammars under limits: `python -m mvllm.structured_output.sandbox_main <parent pid>`.

Some harmless-looking grammars take minutes or gigabytes to compile, or crash the process, and no list of such grammars
is complete. So each grammar is compiled here first, under limits that the kernel enforces: SECONDS of processor time
and MEMORY_BYTES. A grammar that compiles here takes the engine as much again, and no more.

    stdin   Vocabulary, then CompileJobs      each: 4 bytes of length, little-endian, then msgpack
    stdout  a CompileResult per job

The process ends with its parent, or when stdin is closed.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]

from mvllm.executor.process.pipe_process import read_message, write_message
from mvllm.executor.process.process_utils import die_with_parent, limit_memory, limit_processor_time, set_process_name
from mvllm.structured_output import llguidance_library
from mvllm.structured_output.additional_properties import subschemas
from mvllm.structured_output.enforceable_schema import EnforceableSchema
from mvllm.structured_output.structural_tag import sequence, structural_tags
from mvllm.structured_output.vocabulary import Vocabulary, one_line

SECONDS = 3
MEMORY_BYTES = 384 << 20
"""Address space beyond what the process has when it is ready."""

DEFAULT_WHITESPACE = r"(\n[ \t]{0,32}|[ ]{1,4})"
"""Whitespace between the tokens of JSON: a line break with indentation, or a few spaces. Bounded, because a degenerate
model would otherwise generate whitespace until the end."""

_LOCATE_SECONDS = 0.5
_WALK_SECONDS = 0.25
_NUM_WALKS = 3
_WALK_TOKENS = 32


class CompileJob(msgspec.Struct, array_like=True, frozen=True):
    """One constraint to compile, see StructuredOutputsParams.

    Attributes:
        form: `json`, `regex`, `choice`, `grammar` or `structural_tag`.
        text: The schema, regex or grammar; choices and structural tags as JSON.
        whitespace: Regex between the tokens of JSON; None for the default, empty for no whitespace.
        thoughts_start, thoughts_end: Delimiters of reasoning in front of the constrained text.
    """

    form: str
    text: str
    whitespace: str | None = None
    thoughts_start: str | None = None
    thoughts_end: str | None = None


class CompileResult(msgspec.Struct, array_like=True, frozen=True):
    """The result of a job.

    Attributes:
        grammar: The grammar in the library's form; None if it cannot be compiled.
        error: The reason in that case.
        memory: Bytes that compiling took.
        is_permanent: Compiling again would fail again. False where the error is about the state of the machine.
        relaxations: Keywords of JSON schemas that the grammar does not enforce, see `schema_rewriting`.
    """

    grammar: str | None
    error: str | None = None
    memory: int = 0
    is_permanent: bool = True
    relaxations: tuple[str, ...] = ()


def main() -> None:
    """The program."""
    die_with_parent(int(sys.argv[1]))
    set_process_name("GrammarSandbox")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jobs, results = sys.stdin.buffer, sys.stdout.buffer
    try:
        tokenizer = read_message(jobs, Vocabulary).build()
        process = psutil.Process()
        limit_memory(MEMORY_BYTES)
        while True:
            job = read_message(jobs, CompileJob)
            limit_processor_time(SECONDS)
            before = process.memory_info().rss
            result = compile_job(tokenizer, job)
            memory = max(0, process.memory_info().rss - before)
            write_message(results, msgspec.structs.replace(result, memory=memory))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        sys.stdout.flush()
        os._exit(0)


def compile_job(tokenizer: Any, job: CompileJob) -> CompileResult:
    """Compiles a job."""
    started = time.monotonic()
    relaxations: tuple[str, ...] = ()
    try:
        grammar, error, relaxations = to_grammar(tokenizer, job)
        if error is None and job.thoughts_end is not None:
            grammar = after_reasoning(tokenizer, job.thoughts_start, job.thoughts_end, grammar)
            error = find_error(tokenizer, grammar)
    except Exception as e:  # noqa: BLE001  (it is the result)
        error = one_line(e) or type(e).__name__
    if error is None:
        return CompileResult(grammar, relaxations=relaxations)
    if job.form == "json" and " at #" not in error and time.monotonic() - started < _LOCATE_SECONDS:
        error = f"{error} (at {_locate(tokenizer, job, error)})"
    return CompileResult(None, error)


def to_grammar(tokenizer: Any, job: CompileJob) -> tuple[str, str | None, tuple[str, ...]]:
    """The grammar of a job in the library's form, why it is not usable, and what it does not enforce.

    Raises:
        Exception: The text is not a valid schema, regex, choice list or grammar.
    """
    matcher = llguidance_library.load().LLMatcher
    grammar: str
    match job.form:
        case "json":
            schema = EnforceableSchema(tokenizer, json.loads(job.text), _options(job.whitespace), find_error)
            error = schema.compile()
            return schema.grammar, error, schema.relaxations
        case "structural_tag":
            return _structural_tags(tokenizer, job.text)
        case "regex":
            # ASCII classes as in JSON schemas: what Unicode classes match depends on the Unicode version.
            pattern = llguidance_library.load().regex_to_lark(job.text, use_ascii="dws")
            grammar = matcher.grammar_from_lark(f"start: /{pattern}/")
        case "choice":
            texts = json.loads(job.text)
            # One terminal: as alternatives of a rule, all choices would be parser items, whose number is limited.
            grammar = matcher.grammar_from_lark("start: C\nC: " + " | ".join(json.dumps(text) for text in texts))
        case _:
            from llguidance.gbnf_to_lark import any_to_lark  # type: ignore[import-not-found, unused-ignore]

            grammar = matcher.grammar_from_lark(any_to_lark(job.text))
    return grammar, find_error(tokenizer, grammar), ()


def _structural_tags(tokenizer: Any, text: str) -> tuple[str, str | None, tuple[str, ...]]:
    """The grammar of a structural tag. Only if the library refuses it is the schema of each structure compiled."""
    described = json.loads(text)
    options = _options(None)
    schemas = [EnforceableSchema(tokenizer, tag["schema"], options, find_error) for tag in described["structures"]]
    for attempt in range(2):
        for tag, schema in zip(described["structures"], schemas, strict=True):
            if attempt and (error := schema.compile()) is not None:
                return "", error, ()
            tag["schema"] = schema.rewritten
        grammar = structural_tags(tokenizer, described, options)
        error = find_error(tokenizer, grammar)
        if error is None:
            break
    names = dict.fromkeys(name for schema in schemas for name in schema.relaxations)
    return grammar, error, tuple(names)


def after_reasoning(tokenizer: Any, start: str | None, end: str, grammar: str) -> str:
    """A grammar of reasoning, a little white space, and then `grammar`.

    Reasoning is any text up to the first `end`. With `start` it begins with `start` or is absent; without it, the text
    begins inside the reasoning. Special tokens in a delimiter match as tokens, not as text.
    """
    close = sequence(tokenizer, end)
    top = "start: thoughts gap @form"
    if start is not None:
        top = f"start: (begin thoughts gap)? @form\nbegin: {sequence(tokenizer, start)}"
    lazy = "" if close.startswith("<") else "[lazy]"
    lark = f"{top}\nthoughts{lazy}: FREE {close}\nFREE: /(?s:.*)/\ngap: /[ \\t\\r\\n]{{0,8}}/\n"
    form = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**form, "name": "form"}]})


def _options(whitespace: str | None) -> dict[str, Any]:
    if whitespace == "":
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": DEFAULT_WHITESPACE if whitespace is None else whitespace}


def find_error(tokenizer: Any, grammar: str) -> str | None:
    """Why no first token is possible, or why outputs could fail later; None if the grammar is usable."""
    api = llguidance_library.load()
    matcher = api.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance_library.limits(api))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return _find_limit(matcher)
    reason = one_line(matcher.get_error())
    return "no text can match it" if reason.startswith("NoExtension") else reason


def _find_limit(beginning: Any) -> str | None:
    """Follows a few random paths through a grammar: a grammar that exceeds the parser's limits mostly shows it soon.

    A limit that is not found here fails the request that reaches it, with the same message.
    """
    deadline = time.monotonic() + _WALK_SECONDS
    for seed in range(_NUM_WALKS):
        rng, matcher = random.Random(seed), beginning.deep_copy()
        for _ in range(_WALK_TOKENS):
            mask = matcher.compute_bitmask()
            token = None if matcher.is_error() else _some_bit(rng, mask)
            if token is None or matcher.is_stopped() or time.monotonic() > deadline:
                break  # a vocabulary without a matching token is not an error of the grammar
            if not matcher.consume_token(token):
                return one_line(matcher.get_error())
    return None


def _some_bit(rng: random.Random, bits: bytes) -> int | None:
    """The position of a random set bit; None if no bit is set."""
    start = rng.randrange(len(bits))
    for i in range(len(bits)):
        at = (start + i) % len(bits)
        if bits[at]:
            return at * 8 + rng.choice([bit for bit in range(8) if bits[at] >> bit & 1])
    return None


def _locate(tokenizer: Any, job: CompileJob, error: str) -> str:
    """JSON pointer to the smallest part of a schema that fails with the same error as the whole."""
    root = json.loads(job.text)
    definitions = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, dict) and key in root}
    deadline = time.monotonic() + _LOCATE_SECONDS
    place, part = "#", root
    while True:
        for path, child in subschemas(part):
            if time.monotonic() > deadline:
                return place
            text = json.dumps({**definitions, **child})
            try:
                found = to_grammar(tokenizer, CompileJob("json", text, job.whitespace))[1]
            except Exception as e:  # noqa: BLE001  (compared)
                found = one_line(e)
            if found == error:
                place, part = f"{place}/{path}", child
                break
        else:
            return place


if __name__ == "__main__":
    main()
