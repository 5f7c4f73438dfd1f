"""Failed steps and rows: requests that depend on their blocks restart, and no hash of these blocks remains.

The fake runner writes nothing in a step without memory. A request that reads such a slot samples `WRONG_TOKEN`; the
tests compare tokens with those of a request that runs alone.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvllm.messages.pooling_params import PoolingType
from mvllm.messages.requests import NOTHING_TO_SAMPLE, FinishReason
from mvllm.messages.sampling_params import RequestOutputKind
from mvllm.scheduler.request import RequestStatus
from tests.unit.scheduler.builders import Engine, companion_prompt, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens, logprobs_of, vector_of

MAX_MODEL_LEN = 48
PROMPT = list(range(1, 18))


def tokens_of(request) -> list[int]:
    adapter = 0 if request.lora_request is None else request.lora_request.lora_int_id
    return expected_tokens(
        request.prompt_token_ids,
        request.sampling_params,
        request.eos_token_ids,
        MAX_MODEL_LEN,
        adapter,
        companion_prompt(request),
    )


def make_engine(depth: int = 2, **options: object) -> Engine:
    return Engine(make_scheduler(max_model_len=MAX_MODEL_LEN, **options), depth=depth)


def collect_all(engine: Engine) -> None:
    while engine.in_flight:
        engine.collect()
    engine.check_hashes()


def check_all_again(engine: Engine, requests) -> None:
    """Runs every prompt again, on the current cache."""
    engine.check_hashes()
    for request in requests:
        request.request_id += "-again"
        [result] = engine.run(request)
        assert result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert result.token_ids == tokens_of(request)
        engine.check_hashes()


KINDS = pytest.mark.parametrize(
    ("common", "options"),
    [
        ({}, {}),
        ({}, {"windows": (None, 6)}),
        ({}, {"windows": (5,)}),
        ({"sibling_group": "g"}, {"enable_caching": False}),
        ({"lora_int_id": 1}, {"max_loras": 1}),
        ({}, {"max_num_batched_tokens": 12}),
    ],
    ids=["shared", "two groups", "window", "siblings", "adapter", "in chunks"],
)


@KINDS
@pytest.mark.parametrize("depth", [2, 3])
def test_requests_that_read_blocks_of_a_failed_step_restart_and_give_correct_tokens(depth, common, options):
    engine = make_engine(depth, **options)
    writer, reader = (make_request([*PROMPT, i], request_id=name, **common) for i, name in enumerate(("a", "b")))
    unrelated = make_request(8, max_tokens=12)
    engine.runner.steps_without_memory = {1}
    engine.add(unrelated)
    engine.step()
    engine.scheduler.abort_requests([unrelated.request_id])
    other = make_request(8, max_tokens=12)
    engine.add(writer)
    plan = engine.scheduler.schedule()
    engine.in_flight.append((plan, engine.runner.execute(plan)))
    engine.add(reader, other)
    plan = engine.scheduler.schedule()
    assert {new.request_id for new in plan.new_requests if new.num_computed_tokens} == {"b"}
    engine.in_flight.append((plan, engine.runner.execute(plan)))
    engine.run()
    engine.check_hashes()
    assert engine.results["a"].finish_reason is FinishReason.ERROR
    for request in (reader, other):
        assert engine.results[request.request_id].token_ids == tokens_of(request)
    check_all_again(engine, [writer, reader])


def execute_ahead(engine: Engine, *requests) -> None:
    """Makes and executes one more plan, without applying results."""
    engine.add(*requests)
    plan = engine.scheduler.schedule()
    engine.scheduler.check_integrity()
    engine.in_flight.append((plan, engine.runner.execute(plan)))


def test_indirect_readers_restart_and_readers_of_confirmed_blocks_continue():
    engine = make_engine()
    old = make_request([*range(40, 53)], request_id="old")
    engine.run(old)
    engine.runner.steps_without_memory = {engine.scheduler.next_step}
    chain = [make_request(PROMPT[: 9 + 4 * i], request_id=f"r{i}", max_tokens=6) for i in range(3)]
    keeps = make_request([*range(40, 53), 1], request_id="keeps", max_tokens=6)
    execute_ahead(engine, chain[0])
    execute_ahead(engine, chain[1], keeps)
    execute_ahead(engine, chain[2])
    assert engine.scheduler.requests.by_id["r2"].num_cached_tokens == 12, (
        "it shares what r1 computes behind r0's blocks"
    )
    engine.collect()
    statuses = {name: request.status for name, request in engine.scheduler.requests.by_id.items()}
    assert statuses == {
        "r1": RequestStatus.WAITING,
        "r2": RequestStatus.WAITING,
        "keeps": RequestStatus.RUNNING,
    }
    engine.run()
    for request in (*chain[1:], keeps):
        assert engine.results[request.request_id].token_ids == tokens_of(request)
    assert engine.runner.num_computed["keeps"] == 2 + 5, "nothing of it was computed twice"
    check_all_again(engine, [*chain, keeps])


@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("what", ["abort", "fail", "preempt"])
def test_finished_and_preempted_readers_are_discarded_too(which, what):
    engine = make_engine(num_blocks=24)
    engine.runner.steps_without_memory = {0}
    first, second, third = (make_request([*PROMPT, i], request_id=name, max_tokens=8) for i, name in enumerate("abc"))
    execute_ahead(engine, first)
    execute_ahead(engine, second)
    if what == "abort":
        engine.scheduler.abort_requests([which])
    elif what == "fail":
        engine.scheduler.fail_request(which, "for another reason")
    else:
        scheduler = engine.scheduler
        while which in {request.request_id for request in scheduler.requests.running}:
            scheduler.requests.preempt_last()
    engine.scheduler.check_integrity()
    execute_ahead(engine, third)
    assert engine.scheduler.requests.by_id["c"].num_cached_tokens == 16
    collect_all(engine)
    engine.run()
    assert engine.results["c"].token_ids == tokens_of(third)
    if which == "a" or what == "preempt":
        assert engine.results["b"].token_ids == tokens_of(second)
    check_all_again(engine, [first, second, third])


def test_blocks_reallocated_to_another_request_are_not_evicted():
    engine = make_engine(num_blocks=6)
    engine.runner.steps_without_memory = {0}
    execute_ahead(engine, make_request(PROMPT, request_id="a"))
    engine.scheduler.abort_requests(["a"])
    other = make_request(16, request_id="other", max_tokens=5)
    execute_ahead(engine, other)  # allocates most of the blocks
    execute_ahead(engine)
    collect_all(engine)
    engine.run()
    assert engine.results["other"].token_ids == tokens_of(other)
    [again] = engine.run(make_request([*other.prompt_token_ids, 1]))
    assert again.num_cached_tokens == 16, "its names were kept"


def test_a_reader_keeps_what_it_had_generated_before_it_was_preempted():
    engine = make_engine(depth=2, policy="priority", max_num_batched_tokens=17)
    second = make_request([*PROMPT, 3], request_id="b", max_tokens=12, logprobs=1)
    engine.add(second)
    for _ in range(6):
        engine.step()
    scheduler = engine.scheduler
    scheduler.requests.preempt_last()
    scheduler._kv_cache._pool.evict_all()
    collect_all(engine)
    assert 3 < len(engine.results["b"].token_ids) < 12
    engine.runner.steps_without_memory = {scheduler.next_step}
    execute_ahead(engine, make_request(PROMPT, request_id="a", priority=-1))  # the whole budget of the step
    execute_ahead(engine)
    assert len(scheduler.requests.running) == 2
    engine.run()
    assert engine.results["b"].token_ids == tokens_of(second)
    assert engine.results["b"].logprobs == [logprobs_of(token) for token in tokens_of(second)]
    check_all_again(engine, [second])


def test_a_pooling_request_that_reads_failed_blocks_is_recomputed():
    engine = make_engine()
    engine.runner.steps_without_memory = {0}
    execute_ahead(engine, make_request(PROMPT, request_id="a"))
    execute_ahead(engine, make_request([*PROMPT, 9], request_id="b", pooling=PoolingType.LAST))
    engine.run()
    assert engine.results["b"].outputs[-1].pooling_output == vector_of([*PROMPT, 9])


@pytest.mark.parametrize("pooling", [None, PoolingType.MEAN], ids=["prompt logprobs", "vector"])
def test_results_of_later_pieces_of_a_prompt_are_dropped_when_the_request_has_ended_and_the_first_piece_fails(pooling):
    engine = make_engine(max_num_batched_tokens=8)
    engine.runner.steps_without_memory = {0}
    wanted = {"prompt_logprobs": 1} if pooling is None else {"pooling": pooling}
    execute_ahead(engine, make_request(PROMPT, request_id="a", **wanted))
    execute_ahead(engine)
    execute_ahead(engine)
    engine.scheduler.abort_requests(["a"])
    collect_all(engine)
    [other] = engine.run(make_request(PROMPT, prompt_logprobs=1))
    assert other.prompt_logprobs == [logprobs_of(token) for token in PROMPT[1:]]


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_computed_without_the_adapter_are_evicted(depth):
    engine = make_engine(depth, max_loras=2)
    first, second, third = (
        make_request([*PROMPT, i], request_id=name, lora_int_id=1, max_tokens=6) for i, name in enumerate("abc")
    )
    engine.runner.missing_adapters = {1}
    execute_ahead(engine, first)
    engine.runner.missing_adapters = set()  # its files are restored
    if depth == 1:
        engine.collect()
    execute_ahead(engine, second)
    collect_all(engine)
    results = engine.run(third)
    assert engine.results["a"].outputs[-1].error == "no such adapter"
    assert [engine.results["b"].token_ids, results[0].token_ids] == [tokens_of(second), tokens_of(third)]
    check_all_again(engine, [first, second, third])


def test_successive_out_of_memory_steps_fail_only_requests_that_were_in_them():
    engine = make_engine(depth=3)
    engine.runner.steps_without_memory = {0, 1}
    first, second = (make_request([*PROMPT, i], request_id=name) for i, name in enumerate("ab"))
    execute_ahead(engine, first)
    execute_ahead(engine, second, make_request(5, request_id="c"))
    engine.run()
    assert [engine.results[name].finish_reason for name in "ac"] == [FinishReason.ERROR] * 2
    assert engine.results["b"].token_ids == tokens_of(second), "it had to start again anyway"
    check_all_again(engine, [first, second])


def test_a_request_whose_parameters_allow_no_token_keeps_its_blocks_cached():
    engine = make_engine()
    engine.add(make_request(PROMPT, request_id="a", allowed_token_ids=[1], logit_bias={1: -100.0}))
    plan = engine.scheduler.schedule()
    output = engine.runner.execute(plan)
    output.errors, output.sampled_token_ids = {0: NOTHING_TO_SAMPLE}, [-1]
    engine.in_flight.append((plan, output))
    second = make_request([*PROMPT, 3], request_id="b")
    execute_ahead(engine, second)
    engine.run()
    assert engine.results["a"].finish_reason is FinishReason.ERROR
    assert engine.results["b"].token_ids == tokens_of(second)
    assert engine.runner.num_computed["b"] == 2 + 3, "16 of its 18 tokens were found"


limits = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(12, 40),
        "block_size": st.sampled_from([1, 2, 4]),
        "max_num_seqs": st.integers(2, 6),
        "max_num_batched_tokens": st.integers(4, 40),
        "enable_caching": st.sampled_from([True, True, True, False]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "windows": st.sampled_from([(None,), (None,), (None,), (1,), (3,), (None, 4), (2, 9), (None, None, 5, 5)]),
        "max_loras": st.integers(1, 2),
    }
)

ways = st.sampled_from(
    [
        {"depth": 1},
        {"depth": 2},
        {"depth": 2},
        {"depth": 3},
        {"depth": 2, "num_stages": 2},
        {"depth": 4, "num_stages": 4},
        {"depth": 1, "num_speculative_tokens": 2, "num_lookahead_tokens": 2},
        {"depth": 3, "num_stages": 3, "num_speculative_tokens": 3, "num_lookahead_tokens": 3},
    ]
)

traffic = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            lambda shared, own: [*PROMPT[:shared], *own], st.integers(6, 17), st.lists(st.just(3), max_size=6)
        ),
        "max_tokens": st.integers(1, 10),
        "eos": st.sampled_from([[], [7], list(range(0, 50, 6))]),
        "priority": st.integers(-1, 1),
        "cache_salt": st.sampled_from([None, None, None, "a"]),
        "sibling_group": st.sampled_from([None, "g"]),
        "lora_int_id": st.sampled_from([0, 0, 1, 2]),
        "logprobs": st.sampled_from([None, 1]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "output_kind": st.sampled_from(list(RequestOutputKind)),
        "companion": st.sampled_from([None, None, PROMPT[:5], PROMPT, [3] * 7]),
    }
)

events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), traffic),
        st.tuples(st.just("add and step"), traffic),
        st.tuples(st.just("no memory, add and step"), traffic),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 12)),
        st.tuples(st.just("not a number"), st.integers(0, 25)),  # from 13 on, the companion of a request
        st.tuples(st.just("adapter goes"), st.integers(1, 2)),
        st.tuples(st.just("adapter comes"), st.integers(1, 2)),
    ),
    max_size=36,
)


def propose(tokens: list[int]) -> list[int]:
    """Correct and wrong draft tokens."""
    return [*expected_tokens(tokens, make_request(max_tokens=2).sampling_params, [], MAX_MODEL_LEN), 3][:2]


@settings(deadline=None, max_examples=200)
@given(limits, ways, events)
def test_after_any_failure_other_requests_give_correct_tokens_and_hashes_are_valid(limits, way, events):
    way = dict(way)
    engine = make_engine(way.pop("depth"), **limits, **way)
    if "num_speculative_tokens" in way:
        engine.runner.propose = propose
    runner, scheduler, added, aborted = engine.runner, engine.scheduler, [], set()
    for event, argument in events:
        if "no memory" in event:
            runner.steps_without_memory.add(scheduler.next_step)
        if "add" in event:
            added.append(make_request(**argument, request_id=f"r{len(added)}"))
            limits_of_step = scheduler._config.max_num_seqs, scheduler._config.max_num_batched_tokens
            if min(limits_of_step) < 2 or "num_speculative_tokens" in way:
                added[-1].pair = None
            engine.add(added[-1])
        if "step" in event:
            for _ in range(argument if event == "step" else 1):
                engine.step()
                engine.check_hashes()
        if event == "abort":
            if f"r{argument}" in scheduler.requests.by_id:
                aborted.add(f"r{argument}")
            scheduler.abort_requests([f"r{argument}"])
            scheduler.check_integrity()
        elif event == "not a number":
            runner.failing.add(f"r{argument}" if argument < 13 else f"r{argument - 13} (companion)")
        elif event == "adapter goes":
            runner.missing_adapters.add(argument)
        elif event == "adapter comes":
            runner.missing_adapters.discard(argument)
    engine.run()
    engine.check_hashes()
    for request in added:
        check_result(engine, request, ended_early=request.request_id in aborted)
    assert scheduler.make_stats().kv_cache_usage == 0.0

    runner.failing.clear()
    runner.steps_without_memory.clear()
    runner.missing_adapters.clear()
    for request in added:
        request.request_id += "-again"
        engine.run(request)
        check_result(engine, request, ended_early=False)
        if engine.results[request.request_id].finish_reason is FinishReason.ERROR:
            assert "needs room" in engine.results[request.request_id].outputs[-1].error
    engine.step()
    assert not runner.rows


def check_result(engine: Engine, request, *, ended_early: bool) -> None:
    result, expected = engine.results[request.request_id], tokens_of(request)
    if ended_early or result.finish_reason is FinishReason.ERROR:
        assert result.token_ids == expected[: len(result.token_ids)]
        return
    assert result.token_ids == expected
    assert result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if request.sampling_params.logprobs is not None:
        assert result.logprobs == [logprobs_of(token) for token in expected]
    if request.sampling_params.prompt_logprobs is not None:
        assert result.prompt_logprobs == [logprobs_of(token) for token in request.prompt_token_ids[1:]]


@pytest.mark.parametrize("failing", range(6))
def test_a_failure_at_any_step_is_recovered(failing):
    """The same traffic once per step: with shared prefixes of every kind, and that step without memory."""
    for depth, stages in ((1, 1), (2, 1), (3, 3)):
        engine = make_engine(depth, num_stages=stages, max_num_batched_tokens=16, num_blocks=40)
        engine.runner.steps_without_memory = {failing}
        prompts = [PROMPT, [*PROMPT, 3], PROMPT[:9], [*PROMPT, *range(20, 30)], [*PROMPT, 3, 4], PROMPT[:13]]
        requests = [make_request(prompt, max_tokens=5) for prompt in prompts]
        for request in requests:
            engine.add(request)
            engine.step()
        engine.run()
        for request in requests:
            result = engine.results[request.request_id]
            assert result.finish_reason is FinishReason.ERROR or result.token_ids == tokens_of(request)
        assert any(engine.results[r.request_id].finish_reason is FinishReason.ERROR for r in requests)
        check_all_again(engine, requests)
