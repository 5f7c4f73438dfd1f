"""Structured outputs end to end, with models whose free output is noise."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from mvllm import LLM, RequestError, SamplingParams, StructuredOutputsParams
from mvllm.engine.core.engine_core import EngineCore
from mvllm.engine.core.grammars import load_vocabulary
from mvllm.engine.frontend.outputs import CompletionOutput
from mvllm.engine.process.inproc_client import InprocClient
from mvllm.executor import rpc_messages
from mvllm.executor.uniproc import UniProcExecutor
from mvllm.messages.sampling_params import RequestOutputKind
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.structured_output import llguidance_library
from mvllm.structured_output.grammar_compiler import CompiledGrammar, GrammarCompiler, make_compile_job
from mvllm.structured_output.output_validator import TextToValidate
from mvllm.structured_output.sandbox import GrammarSandbox
from mvllm.structured_output.sandbox_main import CompileJob, to_grammar
from mvllm.structured_output.sequence_grammar import SequenceGrammar
from mvllm.worker.worker import Worker
from mvllm_cpu.platform import CPUPlatform
from tests.engine.conftest import MakeLLM
from tests.helpers.parity import engine
from tests.helpers.schemas import random_regex, random_schema
from tests.helpers.threads import SECONDS, run_in_threads

ROOM = {"kv_cache_memory_bytes": 1 << 24, "max_num_seqs": 32}
PROMPT = [5, 6, 7, 8]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with engine(checkpoint, **ROOM) as llm:
        yield llm


def wanted(max_tokens: int = 60, seed: int = 0, temperature: float = 1.0, **form: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**form)
    )


def run(llm: LLM, params: list[SamplingParams]) -> list[CompletionOutput]:
    prompts = [{"prompt_token_ids": PROMPT} for _ in params]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False, raise_on_error=False)]


def assert_prefix(llm: LLM, params: SamplingParams, output: CompletionOutput) -> None:
    """Asserts that the output is a prefix of valid text: the library's matcher accepts every token."""
    api = llguidance_library.load()
    wish = params.structured_outputs
    assert wish is not None
    tokenizer = load_vocabulary(llm.llm_engine.model_config).build()
    matcher = api.LLMatcher(tokenizer, to_grammar(tokenizer, make_compile_job(wish))[0], log_level=0)
    assert matcher.try_consume_tokens(list(output.token_ids)) == len(output.token_ids), output.text


def check_schemas(llm: LLM, number: int, seed: int) -> None:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(number)]
    asked = [wanted(json=schema, seed=i) for i, schema in enumerate(schemas)]
    num_whole = 0
    for schema, params, output in zip(schemas, asked, run(llm, asked), strict=True):
        assert output.error is None, (schema, output.error)
        if output.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))
            num_whole += 1
        else:
            assert output.finish_reason == "length"
            assert_prefix(llm, params, output)
    assert num_whole > number // 2


def check_regexes(llm: LLM, number: int, seed: int) -> None:
    rng = random.Random(seed)
    patterns = [random_regex(rng) for _ in range(number)]
    asked = [wanted(regex=pattern, seed=i) for i, pattern in enumerate(patterns)]
    num_whole = 0
    for pattern, params, output in zip(patterns, asked, run(llm, asked), strict=True):
        assert output.error is None, (pattern, output.error)
        if output.finish_reason == "stop":
            assert re.fullmatch(pattern, output.text), (pattern, output.text)
            num_whole += 1
        else:
            assert_prefix(llm, params, output)
    assert num_whole > number // 2


def test_outputs_match_generated_schemas(llm: LLM) -> None:
    check_schemas(llm, 60, seed=1)


def test_outputs_match_generated_patterns(llm: LLM) -> None:
    check_regexes(llm, 30, seed=1)


@pytest.mark.exhaustive
def test_outputs_match_many_generated_schemas_and_patterns(llm: LLM) -> None:
    check_schemas(llm, 500, seed=2)
    check_regexes(llm, 100, seed=2)


def test_every_kind_of_constraint(llm: LLM) -> None:
    choices = ["yes", 'no, "never"', "été\n"]
    asked = [
        wanted(choice=choices),
        wanted(json_object=True, max_tokens=8),
        wanted(grammar='root ::= "a" "b"+ tail\ntail ::= [0-9]{2}'),
        wanted(grammar='start: "<" word ">"\nword: /[a-z]{3}/'),
        wanted(json=json.dumps(POINT), disable_any_whitespace=True),
        wanted(json=POINT, whitespace_pattern="[ ]{1,2}"),
    ]
    choice, anything, ebnf, lark, compact, spaced = run(llm, asked)
    assert choice.text in choices
    assert anything.text.startswith("{")
    assert re.fullmatch("ab+[0-9]{2}", ebnf.text) or ebnf.finish_reason == "length"
    assert re.fullmatch("<[a-z]{3}>", lark.text)
    assert re.fullmatch(r'\{"x":\d+,"on":(true|false)\}', compact.text)
    assert re.fullmatch(r'\{ {0,2}"x" {0,2}: {0,2}\d+ {0,2}, {0,2}"on" {0,2}: {0,2}(true|false) {0,2}\}', spaced.text)


def test_tokens_are_the_same_alone_and_in_any_batch(llm: LLM, make_llm: MakeLLM) -> None:
    asked = [
        wanted(json=POINT, seed=1),
        wanted(regex="[a-f0-9]{12}", temperature=0.0),
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, max_tokens=30, ignore_eos=True, repetition_penalty=1.2),
        wanted(json={"type": "array", "items": POINT, "minItems": 2, "maxItems": 2}, seed=7, max_tokens=90),
    ]
    alone = [list(run(llm, [params])[0].token_ids) for params in asked]
    tight = {"kv_cache_memory_bytes": 12 * 16 * 768, "max_num_batched_tokens": 8, "max_num_seqs": 6}
    engines = [
        llm,
        make_llm(**ROOM, async_scheduling=True),
        make_llm(**tight),  # row by row, with chunked prompts, and with preemption
        make_llm(**tight, async_scheduling=True),
    ]
    for other in engines:
        for order in (asked, asked[::-1]):
            found = {id(p): list(o.token_ids) for p, o in zip(order, run(other, order * 2), strict=False)}
            assert [found[id(params)] for params in asked] == alone
    assert any(each.llm_engine.stats.num_preemptions for each in engines[2:])  # type: ignore[union-attr]


class ExecutorWithoutDeferredMasks(UniProcExecutor):
    """An executor without support for deferred masks."""

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future = super().execute_model(plan)
        future.result()
        return future


class WorkerWithoutDeferredMasks(Worker):
    """A worker without support for deferred masks."""

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        output = super().execute_model(plan)
        assert output is not None
        return output


@pytest.mark.parametrize(
    ("settings", "num_steps"),
    [
        ({}, 40),
        ({"distributed_executor_backend": f"{__name__}:ExecutorWithoutDeferredMasks"}, 50),
        ({"worker_class": f"{__name__}:WorkerWithoutDeferredMasks"}, 50),
        ({"async_scheduling": False}, 40),
    ],
    ids=["asynchronous", "older executor", "older worker", "synchronous"],
)
def test_a_row_with_a_grammar_advances_in_every_step(
    llm: LLM, make_llm: MakeLLM, settings: dict[str, Any], num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without deferred masks, it advances in every second step next to another row."""
    if worker := settings.pop("worker_class", None):
        monkeypatch.setattr(CPUPlatform, "worker_class", lambda self: worker)
    other = make_llm(**ROOM, **{"async_scheduling": True, **settings})
    asked = [
        wanted(regex="[a-f0-9]{400}", seed=1, max_tokens=40),
        SamplingParams(temperature=1.0, seed=2, max_tokens=20, ignore_eos=True),
    ]
    run(other, asked)  # compiles the grammar and computes the masks' automata
    before = core_of(other).scheduler.next_step
    found = run(other, asked)
    assert core_of(other).scheduler.next_step - before == num_steps
    assert [output.token_ids for output in found] == [output.token_ids for output in run(llm, asked)]


def test_each_sequence_of_a_prompt_follows_the_grammar_independently(llm: LLM) -> None:
    params = wanted(regex="[a-z]{2}[0-9]{4}")
    params.n = 6
    output = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0]
    texts = [sequence.text for sequence in output.outputs]
    assert all(re.fullmatch("[a-z]{2}[0-9]{4}", text) for text in texts) and len(set(texts)) > 1


def test_sequences_end_only_where_the_text_is_complete(llm: LLM) -> None:
    eos = llm.llm_engine.input_processor._eos_token_ids
    long_enough = wanted(regex="(ab)+", max_tokens=60)
    long_enough.min_tokens = 12
    goes_on = wanted(regex="ab{0,3}c")
    goes_on.ignore_eos = True
    (digit,) = llm.get_tokenizer().encode("7", add_special_tokens=False)
    stopped = wanted(regex="[0-9]{5}x?", max_tokens=60)
    stopped.stop_token_ids = [digit]
    logged = wanted(choice=["yes", "no"])
    logged.logprobs = 2
    first, second, third, fourth = run(llm, [long_enough, goes_on, stopped, logged])
    assert (re.fullmatch("(ab)+", first.text) and len(first.token_ids) >= 12) or first.finish_reason == "length"
    assert re.fullmatch("ab{0,3}c", second.text) and second.finish_reason == "stop"
    # A user's stop token is allowed only where the text is complete.
    assert re.fullmatch("[0-68-9]{5}x?", third.text) and third.finish_reason == "stop"
    assert third.token_ids[-1] in [*eos, digit]
    assert fourth.logprobs is not None and len(fourth.logprobs) == len(fourth.token_ids)


def test_a_schema_that_cannot_be_compiled_fails_alone_with_the_error_position(llm: LLM) -> None:
    asked = [
        wanted(json={"type": "object", "properties": {"q": {"items": {"type": "strng"}, "type": "array"}}}),
        wanted(regex="(["),
        wanted(grammar="start: nowhere"),
        wanted(json=POINT),
        wanted(json={"type": "integer", "multipleOf": 999983}),  # compiling takes minutes
        SamplingParams(max_tokens=4, ignore_eos=True),
    ]
    schema, pattern, grammar, fine, slow, free = run(llm, asked)
    assert "strng" in str(schema.error) and "#/properties/q/items" in str(schema.error)
    assert "regular expression" in str(pattern.error) and "unclosed" in str(pattern.error)
    assert "nowhere" in str(grammar.error)
    assert slow.finish_reason == "error" and "takes more than" in str(slow.error)
    assert {each.finish_reason for each in (schema, pattern, grammar)} == {"error"}
    jsonschema.validate(json.loads(fine.text), POINT)
    assert len(free.token_ids) == 4


def test_a_refused_schema_is_raised_and_nothing_of_the_call_is_left(llm: LLM) -> None:
    bad, free = wanted(json={"type": "strng"}), SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPT}] * 3
    message = "Prompt 1 of 3: .*strng"
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompts, [free, bad, msgspec.structs.replace(free, n=2)], use_tqdm=False)
    assert caught.value.parameter == "structured_outputs"
    talk = [{"role": "user", "content": "Hello"}]
    with pytest.raises(RequestError, match=message):
        llm.chat([talk] * 3, [free, bad, free], use_tqdm=False)
    with pytest.raises(RequestError, match=r"^[^P].*strng"):
        llm.chat(talk, bad, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests() and llm.reset_prefix_cache()
    outputs = llm.chat([talk] * 3, [free, bad, free], use_tqdm=False, raise_on_error=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].error_parameter == "structured_outputs"


EMPTY = {"type": "string", "maxLength": 0}
TWICE = {"type": "array", "items": EMPTY, "uniqueItems": True, "minItems": 2, "maxItems": 2}


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_results_are_validated_against_what_is_not_enforced(llm: LLM, kind: RequestOutputKind) -> None:
    """In every kind of output, once each sequence has ended."""
    compact = {"disable_any_whitespace": True}
    asked = {
        "wrong": wanted(json=TWICE, **compact),
        "right": wanted(json={**EMPTY, "not": {"pattern": "x"}}, **compact),
        "annotation": wanted(json={**EMPTY, "format": "path"}, **compact),
        "cut": wanted(json=TWICE, max_tokens=1, **compact),
        "enforced": wanted(json=EMPTY, **compact),
    }
    for name, params in asked.items():
        params.output_kind, params.n = kind, 2
        llm.llm_engine.add_request(name, {"prompt_token_ids": PROMPT}, params)
    warnings: dict[str, list[list[str] | None]] = {name: [] for name in asked}
    relaxations: dict[str, tuple[str, ...]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            relaxations[output.request_id] = output.relaxations
            warnings[output.request_id] += [each.warnings for each in output.outputs if each.finished]
            assert all(each.warnings is None for each in output.outputs if not each.finished)
    assert relaxations == {
        "wrong": ("uniqueItems (at #)",), "right": ("not (at #)",), "annotation": ("format 'path' (at #)",),
        "cut": ("uniqueItems (at #)",), "enforced": (),
    }  # fmt: skip
    assert len(warnings["wrong"]) >= 2 and all(
        each is not None and "non-unique elements" in each[0] for each in warnings["wrong"]
    )
    assert warnings["right"][0] == [] and warnings["right"][-1] == []
    assert {*warnings["annotation"], *warnings["cut"], *warnings["enforced"]} == {None}


def test_requests_of_other_threads_run_while_a_result_is_validated(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, opened = threading.Event(), threading.Event()
    now = llm.llm_engine._output_validator._run

    def later(job: TextToValidate) -> list[str]:
        entered.set()
        assert opened.wait(SECONDS)
        return now(job)

    monkeypatch.setattr(llm.llm_engine._output_validator, "_run", later)

    def free() -> list[int]:
        assert entered.wait(SECONDS)
        try:
            return run(llm, [SamplingParams(max_tokens=8, ignore_eos=True)])[0].token_ids
        finally:
            assert not opened.is_set()
            opened.set()

    wrong, tokens = run_in_threads(
        lambda: run(llm, [wanted(json=TWICE, disable_any_whitespace=True)])[0].warnings, free
    )
    assert "non-unique elements" in wrong[0] and len(tokens) == 8
    assert not llm.llm_engine._validations


def test_a_result_that_was_not_detokenized_is_named_as_not_validated(llm: LLM) -> None:
    params = wanted(json=TWICE, disable_any_whitespace=True)
    params.detokenize = False
    [warning] = run(llm, [params])[0].warnings or []
    assert warning.startswith("The output was not validated against uniqueItems (at #): ")


def test_the_process_that_validates_ends_with_the_engine(make_llm: MakeLLM) -> None:
    other = make_llm(**ROOM)
    run(other, [wanted(json=TWICE, disable_any_whitespace=True)])
    pid = other.llm_engine._output_validator._process.pid
    assert pid is not None
    other.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that lets grammar compilation start."""
    opened = threading.Event()
    compile_now = GrammarCompiler.compile

    def compile_then(self: GrammarCompiler, job: CompileJob, sandbox: GrammarSandbox) -> CompiledGrammar:
        opened.wait(120)
        return compile_now(self, job, sandbox)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_then)
    yield opened
    opened.set()


def test_other_requests_run_and_aborts_take_effect_while_a_grammar_is_compiled(llm: LLM, gate: threading.Event) -> None:
    core = llm.llm_engine
    core.add_request("slow", {"prompt_token_ids": PROMPT}, wanted(regex="slowly"))
    core.add_request("free", {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=8, ignore_eos=True))
    ended = set[str]()
    while "free" not in ended:
        ended |= {output.request_id for output in core.step() if output.finished}
    assert core.stats is not None and core.stats.num_waiting == 1
    core.abort_request("slow")
    assert not core.has_unfinished_requests()
    core.step()
    assert core.stats.num_waiting == core.stats.num_running == 0 and core.stats.kv_cache_usage == 0
    gate.set()
    assert run(llm, [wanted(regex="slowly")])[0].text == "slowly"


def test_other_requests_run_while_a_mask_is_computed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other request needs as many steps as without the slow one."""
    may_go, compute = threading.Event(), SequenceGrammar.compute_mask

    def compute_then(self: SequenceGrammar) -> None:
        assert may_go.wait(120)
        compute(self)

    monkeypatch.setattr(
        SequenceGrammar, "expected_seconds", property(lambda self: 1.0, lambda self, value: None), raising=False
    )
    monkeypatch.setattr(SequenceGrammar, "compute_mask", compute_then)
    core = llm.llm_engine
    core.add_request("slow", {"prompt_token_ids": PROMPT}, wanted(regex="[a-z]{3}"))
    texts: dict[str, str] = {}
    num_tokens = 0
    while not num_tokens:  # until it has its first token
        num_tokens = sum(len(output.outputs[0].token_ids) for output in core.step())
    core.add_request("free", {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=8, ignore_eos=True))
    num_steps = 0
    while "free" not in texts:
        texts |= {output.request_id: output.outputs[0].text for output in core.step() if output.finished}
        num_steps += 1
    assert list(texts) == ["free"] and num_steps <= 10
    for _ in range(3):  # without other requests, no steps are run
        next_step = core_of(llm).scheduler.next_step
        assert core.step() == [] and core_of(llm).scheduler.next_step == next_step
    may_go.set()
    while core.has_unfinished_requests():
        texts |= {output.request_id: output.outputs[0].text for output in core.step() if output.finished}
    assert re.fullmatch("[a-z]{3}", texts["slow"])


def test_an_engine_whose_requests_all_wait_for_grammars_runs_no_steps(make_llm: MakeLLM, gate: threading.Event) -> None:
    other = make_llm(**ROOM)
    engine, core = other.llm_engine, core_of(other)
    engine.add_request("blocked", {"prompt_token_ids": PROMPT}, wanted(regex="[a-z]{9}", max_tokens=3))
    for _ in range(20):
        assert engine.step() == []
    assert core.scheduler.next_step == 0 and engine.has_unfinished_requests()
    gate.set()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert re.fullmatch("[a-z]{1,9}", outputs[-1].outputs[0].text)


def test_engines_with_identical_plans_on_every_rank_wait_for_the_grammar(make_llm: MakeLLM) -> None:
    other = make_llm(**ROOM)
    core = core_of(other)
    core._grammars._in_submit = True  # as if every rank ran the whole engine
    other.llm_engine.add_request("here", {"prompt_token_ids": PROMPT}, wanted(regex="[a-z]{3}"))
    assert core.scheduler.num_waiting == 1 and not core.scheduler.is_waiting_for_masks


def core_of(llm: LLM) -> EngineCore:
    client = llm.llm_engine._client
    assert isinstance(client, InprocClient)
    return client._core


@pytest.mark.parametrize(
    "settings",
    [
        {
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "engine_core_process": True,
            "async_scheduling": True,
        },
        pytest.param({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, marks=pytest.mark.exhaustive),
        pytest.param({"distributed_executor_backend": "mp", "async_scheduling": True}, marks=pytest.mark.exhaustive),
    ],
    ids=["core process and tensor parallel", "pipeline", "asynchronous worker process"],
)
def test_tokens_are_the_same_with_every_executor(
    llm: LLM, make_llm: MakeLLM, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_messages, "_MANY_MASK_BYTES", 1)  # equal masks are sent once
    asked = [wanted(json=POINT, seed=i) for i in range(3)]
    asked += [wanted(regex="[a-f]{8}", temperature=0.0), wanted(regex="(["), SamplingParams(temperature=0.0)]
    here, there = run(llm, asked), run(make_llm(**ROOM, **settings), asked)
    assert [output.token_ids for output in there] == [output.token_ids for output in here]
    assert there[4].error == here[4].error


def test_no_process_is_left_behind(make_llm: MakeLLM) -> None:
    other = make_llm(**ROOM)
    run(other, [wanted(choice=["a", "b"])])
    grammars = core_of(other)._grammars._manager
    assert grammars is not None and grammars.sandbox_pids
    pids = grammars.sandbox_pids
    other.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_structured_outputs_without_a_tokenizer_are_refused_by_the_front_end(make_llm: MakeLLM) -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        run(make_llm(skip_tokenizer_init=True), [wanted(choice=["a"])])


def test_structured_outputs_without_the_library_are_refused_with_a_hint(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance_library, "_is_installed", lambda: False)
    with pytest.raises(RequestError, match="pip install 'llguidance>="):
        run(llm, [wanted(choice=["a"])])
    assert len(run(llm, [SamplingParams(max_tokens=3, ignore_eos=True)])[0].token_ids) == 3
