"""Draft tokens, correct or wrong, in any traffic: each request gets the tokens that it gets alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvllm.messages.requests import FinishReason
from mvllm.messages.sampling_params import RequestOutputKind
from mvllm.messages.scheduler_output import BEHIND_ACCEPTED, PLACEHOLDER, ModelRunnerOutput, SchedulerOutput
from mvllm.scheduler import draft_length
from mvllm.scheduler.draft_length import DraftLength
from mvllm.scheduler.request import Request
from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens, fingerprints, logprobs_of, next_token
from tests.unit.scheduler.test_grammar_masks import Countdown
from tests.unit.scheduler.test_random_traffic import MAX_MODEL_LEN, Limits, actions, check_result, limits


def following(tokens: list[int], count: int) -> list[int]:
    """The token that the fake runner samples after `tokens`."""
    found = list(tokens)
    for _ in range(count):
        found.append(next_token(fingerprints(found)[-1]))
    return found[len(tokens) :]


def make_proposer(num_tokens: int, seed: int) -> Callable[[list[int]], list[int]]:
    """Proposes up to `num_tokens` draft tokens, of which a random number of the first are correct."""
    dice = random.Random(seed)

    def propose(tokens: list[int]) -> list[int]:
        drafts = following(tokens, dice.randint(0, num_tokens))
        right = dice.choice([0, len(drafts), dice.randint(0, len(drafts))])
        return drafts[:right] + [dice.randrange(50) for _ in drafts[right:]]

    return propose


def make_engine(
    num_tokens: int = 3,
    *,
    propose: Callable[[list[int]], list[int]] | None = None,
    num_lookahead: int = 0,
    depth: int = 1,
    ahead: bool = False,
    **config: object,
) -> Engine:
    """An engine whose draft tokens are correct by default.

    Args:
        depth: Plans in flight at once.
        ahead: A request is part of all of them, with placeholders of its draft tokens. Otherwise `depth` is the number
            of pipeline stages.
    """
    scheduler = make_scheduler(
        num_speculative_tokens=num_tokens,
        num_lookahead_tokens=num_lookahead,
        num_stages=1 if ahead else depth,
        workers_keep_drafts=ahead,
        **config,
    )
    engine = Engine(scheduler, depth=depth)
    engine.runner.keeps_drafts = ahead
    engine.runner.propose = propose or (lambda tokens: following(tokens, num_tokens))
    return engine


@dataclasses.dataclass
class DraftSettings:
    """How draft tokens are proposed, and how far the worker may write ahead."""

    num_tokens: int
    is_by_model: bool
    seed: int
    plans_ahead: bool
    is_adaptive: bool

    def make_engine(self, limits: Limits) -> Engine:
        given = {name: value for name, value in vars(limits).items() if name not in ("depth", "num_stages")}
        if not limits.enable_chunked_prefill:
            given["max_num_batched_tokens"] = max(limits.max_num_batched_tokens, MAX_MODEL_LEN)
        if self.is_by_model:
            given["windows"] = (None,)
        return make_engine(
            self.num_tokens,
            propose=make_proposer(self.num_tokens, self.seed),
            num_lookahead=self.num_tokens if self.is_by_model else 0,
            depth=limits.depth if self.plans_ahead else limits.num_stages,
            ahead=self.plans_ahead,
            adapts_drafts=self.is_adaptive,
            max_model_len=MAX_MODEL_LEN,
            **given,
        )


draft_settings = st.builds(
    DraftSettings, st.integers(1, 6), st.booleans(), st.integers(0, 1000), st.booleans(), st.booleans()
)


@pytest.fixture(autouse=True, scope="module")
def short_intervals() -> Iterator[None]:
    """The adaptive number of draft tokens changes with most steps."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_FIRST_INTERVAL", "_FIRST_INTERVAL_OF_MANY", "_LONGEST_INTERVAL", "_TRIAL_STEPS"):
            patch.setattr(draft_length, name, 1)
        yield


@settings(deadline=None, max_examples=200)
@given(limits, draft_settings, actions)
def test_any_traffic_gives_the_tokens_of_each_request_alone(limits, draft_settings, actions):
    engine, added, aborted = draft_settings.make_engine(limits), {}, set()
    for action, argument in actions:
        name = f"r{argument % 31}" if isinstance(argument, int) else ""
        if action == "add":
            request = make_request(**argument, request_id=f"r{len(added)}")
            if request.pair is not None and not limits.can_pair(request):
                request.pair = None
            added[request.request_id] = request
            engine.add(request)
        elif action == "step":
            for _ in range(argument):
                engine.step()
        elif action == "abort":
            if name in engine.scheduler.requests.by_id:  # else it may have failed, with its output still to come
                aborted.add(name)
            engine.scheduler.abort_requests([name])
            engine.scheduler.check_integrity()
        elif action == "fail":
            engine.runner.failing.add(name if argument < 31 else f"{name} (companion)")
    engine.run()
    any_failed = bool({name.removesuffix(" (companion)") for name in engine.runner.failing} & added.keys())
    for name, request in added.items():
        check_result(engine, request, limits, ended_early=name in aborted, may_fail=any_failed)
    assert engine.scheduler.make_stats().kv_cache_usage == 0.0

    engine.runner.failing.clear()
    for request in added.values():  # again, with the current cache: it must contain no draft token
        request.request_id += "-again"
        engine.run(request)
        check_result(engine, request, limits, ended_early=False, may_fail=False)
    engine.step()
    assert not engine.runner.rows


@pytest.mark.parametrize(
    ("depth", "num_lookahead", "ahead"), [(1, 0, False), (1, 4, False), (3, 4, False), (2, 4, True)]
)
def test_hundreds_of_requests_leave_no_block_row_or_request_behind(depth, num_lookahead, ahead):
    dice = random.Random(depth)
    engine = make_engine(
        4,
        propose=make_proposer(4, seed=depth),
        num_lookahead=num_lookahead,
        depth=depth,
        ahead=ahead,
        num_blocks=12,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_model_len=MAX_MODEL_LEN,
    )
    requests = []
    while len(requests) < 600:
        for _ in range(dice.randrange(4)):
            prompt = [dice.randrange(2)] * dice.randrange(1, 12) + [dice.randrange(9)]
            request = make_request(prompt, max_tokens=dice.randrange(1, 14), eos=[3], logprobs=dice.choice([None, 1]))
            requests.append(request)
            engine.add(request)
        for _ in range(dice.randrange(5)):
            engine.step()
    engine.run()
    for request in requests:
        result, expected = engine.results[request.request_id], alone(request)
        assert result.token_ids == expected
        if request.sampling_params.logprobs is not None:
            assert result.logprobs == [logprobs_of(token) for token in expected]
    stats = engine.scheduler.make_stats()
    assert stats.num_preemptions > 0 and 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    engine.step()
    engine.run()
    assert not engine.runner.rows and not engine.scheduler._batches


def alone(request):
    return expected_tokens(request.prompt_token_ids, request.sampling_params, request.eos_token_ids, MAX_MODEL_LEN)


def steps_of(engine: Engine, *requests) -> list[SchedulerOutput]:
    """The non-empty plans until the requests are finished."""
    engine.add(*requests)
    plans = []
    while engine.scheduler.has_requests():
        plans.append(engine.step())
    return plans


# ---------------------------------------------------------------------------------------------------- acceptance


def test_accepted_draft_tokens_and_one_more_token_come_in_one_step():
    engine = make_engine(3)
    plans = steps_of(engine, make_request(6, request_id="a", max_tokens=9))
    assert [plan.num_scheduled_tokens for plan in plans] == [[6], [4], [4]]
    assert [len(output.new_token_ids) for output in engine.results["a"].outputs] == [1, 4, 4]
    stats = engine.scheduler.make_stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.accepted_at) == (2, 6, [2, 2, 2])


def test_rejected_draft_tokens_leave_one_token_per_step():
    engine = make_engine(3, propose=lambda tokens: [token + 1 for token in following(tokens, 3)])
    plans = steps_of(engine, make_request(6, request_id="a", max_tokens=5))
    assert [plan.num_scheduled_tokens for plan in plans] == [[6], [4], [3], [2], [1]]
    assert [len(output.new_token_ids) for output in engine.results["a"].outputs] == [1] * 5
    stats = engine.scheduler.make_stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.accepted_at) == (3, 6, [0, 0, 0])


def test_draft_tokens_count_up_to_the_first_mismatch():
    engine = make_engine(3, propose=lambda tokens: [*following(tokens, 1), 99, *following(tokens, 3)[2:]])
    steps_of(engine, make_request(6, request_id="a", max_tokens=9))
    assert [len(output.new_token_ids) for output in engine.results["a"].outputs] == [1, 2, 2, 2, 2]
    stats = engine.scheduler.make_stats()
    assert stats.accepted_at == [4, 0, 0]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_draft_token_is_verified_after_the_last_token(max_tokens):
    engine = make_engine(4, max_model_len=14)
    request = make_request(6, request_id="a", max_tokens=max_tokens)
    longest = min(max_tokens, 8)
    for plan in steps_of(engine, request):
        known = 6 + len(engine.results["a"].token_ids)  # by now
        assert all(len(drafts) < longest for drafts in plan.draft_token_ids.values())
        assert known <= 14
    result = engine.results["a"]
    assert result.finish_reason is FinishReason.LENGTH and len(result.token_ids) == longest
    assert engine.runner.num_computed["a"] == 6 + longest - 1  # each token once, the last never


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("at", range(7))
def test_a_stop_token_ends_a_run_at_any_position(kind, at):
    prompt = [1, 6, 7]
    tokens = following(prompt, 8)
    assert len(set(tokens)) == 8
    stopping = {"stop_token_ids": [tokens[at]], "max_tokens": 20, "logprobs": 1, "output_kind": kind}
    engine = make_engine(7)
    [result] = engine.run(make_request(prompt, **stopping))
    assert (result.token_ids, result.finish_reason) == (tokens[: at + 1], FinishReason.STOP)
    assert result.outputs[-1].stop_reason == tokens[at]
    assert result.logprobs == [logprobs_of(token) for token in tokens[: at + 1]]


def test_an_end_of_sequence_within_min_tokens_of_a_run_ends_nothing():
    prompt = [1, 6, 7]
    tokens = following(prompt, 8)
    engine = make_engine(7)
    [result] = engine.run(make_request(prompt, eos=[tokens[2], tokens[5]], min_tokens=5, max_tokens=20))
    assert (result.token_ids, result.finish_reason) == (tokens[:6], FinishReason.STOP)
    assert result.outputs[-1].stop_reason is None


# ---------------------------------------------------------------------------------- budget and blocks of drafts


def test_draft_tokens_get_the_budget_that_is_left_when_all_others_have_their_token():
    engine = make_engine(8, max_num_batched_tokens=6, max_num_seqs=4)
    requests = [make_request(1, max_tokens=12) for _ in range(4)]
    engine.add(*requests)
    engine.step()
    plan = engine.step()
    assert plan.num_scheduled_tokens == [3, 1, 1, 1] and list(plan.draft_token_ids) == [0]
    engine.run()
    assert [engine.results[request.request_id].token_ids for request in requests] == [alone(r) for r in requests]


def test_a_row_of_a_request_pair_counts_against_the_budget_of_draft_tokens():
    engine = make_engine(3, max_num_batched_tokens=4)
    plans = steps_of(engine, make_request(2, companion=[1], max_tokens=6), make_request(1, max_tokens=6))
    drafts = [[len(each) for each in plan.draft_token_ids.values()] for plan in plans if len(plan.rows) == 3]
    assert [1] in drafts and all(sum(each) <= 1 for each in drafts)


def test_a_draft_token_without_a_free_block_is_dropped():
    speculative, plain = make_engine(4, num_blocks=3), make_engine(4, num_blocks=3, propose=lambda tokens: [])
    for engine in (speculative, plain):
        requests = [make_request(3, request_id="a", max_tokens=6), make_request(3, request_id="b", max_tokens=6)]
        engine.run(*requests)
        assert [engine.results[r.request_id].token_ids for r in requests] == [alone(r) for r in requests]
    assert speculative.scheduler.make_stats().num_preemptions <= plain.scheduler.make_stats().num_preemptions


@pytest.mark.parametrize("num_lookahead", [0, 5])
def test_no_draft_token_gets_a_block_in_the_step_of_a_preemption(num_lookahead):
    engine = make_engine(5, num_lookahead=num_lookahead, num_blocks=10, block_size=2, max_num_seqs=5)
    engine.add(*[make_request(4, max_tokens=12) for _ in range(5)])
    scheduler = engine.scheduler
    num_before = num_seen = 0
    while scheduler.has_requests():
        held = {request: request.table.num_slots for request in scheduler.requests.running}
        plan = scheduler.schedule()
        num_preemptions = scheduler.make_stats().num_preemptions
        if num_preemptions > num_before:
            num_seen += 1
            for request in scheduler.requests.running:
                if request.table.num_slots > held[request]:
                    assert request.table.num_slots - 2 < len(request.token_ids), "a block that no known token needs"
        num_before = num_preemptions
        engine.in_flight.append((plan, engine.runner.execute(plan)))
        engine.collect()
    assert num_seen


def test_a_request_with_a_preempted_neighbour_gets_draft_tokens_again_when_it_resumes():
    engine = make_engine(3, num_blocks=5, block_size=4, max_num_seqs=2)
    requests = [make_request(6, request_id="a", max_tokens=10), make_request(6, request_id="b", max_tokens=10)]
    results = engine.run(*requests)
    assert [result.token_ids for result in results] == [alone(request) for request in requests]
    assert engine.scheduler.make_stats().num_preemptions > 0


def test_blocks_of_rejected_draft_tokens_are_not_found_by_others():
    """A rejected draft token fills a block; a request for these tokens as a prompt must compute the block itself."""
    prompt = [5, 6, 7]
    wrong = [(token + 1) % 50 for token in following(prompt, 8)]
    engine = make_engine(6, propose=lambda tokens: wrong[:6], block_size=4)
    first = following(prompt, 1)
    engine.run(make_request(prompt, max_tokens=8))
    [result] = engine.run(make_request([*prompt, *first, *wrong[:6]], max_tokens=3))
    assert result.num_cached_tokens == 4  # the prompt and the first token
    assert result.token_ids == following([*prompt, *first, *wrong[:6]], 3)


def test_blocks_of_accepted_draft_tokens_are_found_by_others():
    prompt = [5, 6, 7]
    tokens = following(prompt, 14)
    engine = make_engine(6, block_size=4)
    engine.run(make_request(prompt, max_tokens=14))
    [result] = engine.run(make_request([*prompt, *tokens], max_tokens=3))
    assert result.num_cached_tokens == 16
    assert result.token_ids == following([*prompt, *tokens], 3)


def test_draft_tokens_of_a_finished_request_are_dropped():
    engine = make_engine(3)
    stays, new = make_request(6, max_tokens=9), make_request(6, max_tokens=9)
    engine.add(make_request(6, request_id="gone"), stays)
    plan = engine.scheduler.schedule()
    output = engine.runner.execute(plan)
    assert set(output.draft_token_ids) == {0, 1}
    engine.scheduler.abort_requests(["gone"])
    for each in engine.scheduler.update_from_output(plan, output).outputs:
        engine.results[each.request_id].add(each)
    engine.add(new)  # uses the row
    plan = engine.step()
    assert len(plan.draft_token_ids) == 1
    engine.run()
    for request in (stays, new):
        assert engine.results[request.request_id].token_ids == alone(request)


def test_a_draft_ends_before_the_token_that_the_grammar_refuses():
    scheduler = make_engine(3).scheduler
    scheduler.add_request(make_request(request_id="formed", structured_outputs={"regex": "a"}, max_tokens=9))
    scheduler.start_grammar("formed", grammar := Countdown(6))
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, ModelRunnerOutput(plan.step, [7], draft_token_ids={0: [7, 60, 7]}))
    plan = scheduler.schedule()
    assert (plan.draft_token_ids, plan.num_scheduled_tokens) == ({0: [7]}, [2])
    assert plan.mask_rows == plan.rows * 2 and plan.token_masks == bytes([1] * 4 + [2] * 4)
    output = ModelRunnerOutput(plan.step, [7], further_token_ids={0: [8]}, draft_token_ids={0: [60]})
    scheduler.update_from_output(plan, output)
    assert grammar.taken == [7, 7, 8]
    plan = scheduler.schedule()
    assert (plan.draft_token_ids, plan.mask_rows, plan.token_masks) == ({}, plan.rows, bytes([3] * 4))


def test_a_request_ends_where_its_grammar_is_complete_within_a_draft():
    scheduler = make_engine(3).scheduler
    scheduler.add_request(make_request(request_id="formed", structured_outputs={"regex": "a"}, max_tokens=9))
    scheduler.start_grammar("formed", Countdown(3))
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, ModelRunnerOutput(plan.step, [7], draft_token_ids={0: [7, 7, 7]}))
    plan = scheduler.schedule()
    (output,) = scheduler.update_from_output(
        plan, ModelRunnerOutput(plan.step, [7], further_token_ids={0: [7, 7]})
    ).outputs
    assert output.new_token_ids == [7, 7] and output.finish_reason is FinishReason.STOP


# ------------------------------------------------------------------------------ planned before the results are back


def planned_lengths(plans: list[SchedulerOutput]) -> list[list[int]]:
    """The numbers of draft tokens, all of them placeholders, of each plan."""
    drafts = [list(plan.draft_token_ids.values()) for plan in plans]
    assert all(token == PLACEHOLDER for some in drafts for each in some for token in each)
    return [[len(each) for each in some] for some in drafts]


def test_plans_made_ahead_have_placeholders_that_the_worker_replaces():
    engine = make_engine(3, depth=2, ahead=True)
    request = make_request(6, request_id="a", max_tokens=14)
    plans = steps_of(engine, request)
    # 1, 1 + 3, ...: at most 14 tokens are in flight, so the last steps have fewer drafts and some wait for results.
    assert [plan.num_scheduled_tokens for plan in plans[:4]] == [[6], [4], [4], [4]]
    assert planned_lengths(plans[:4]) == [[], [3], [3], [3]]
    assert [len(output.new_token_ids) for output in engine.results["a"].outputs] == [1, 4, 4, 4, 1]
    assert engine.results["a"].token_ids == alone(request)
    stats = engine.scheduler.make_stats()
    assert stats.accepted_at == [3, 3, 3] and (stats.num_drafts, stats.num_draft_tokens) == (3, 9)


def test_a_plan_made_ahead_has_no_more_placeholders_than_the_step_before_asked_for(monkeypatch):
    """Placeholders take budget and blocks, also if no drafts come for them."""
    most = [2, 0, 0, 1, 3] * 9
    monkeypatch.setattr(DraftLength, "start_step", lambda *_: most.pop(0))
    monkeypatch.setattr(DraftLength, "end_step", lambda *_: None)
    engine = make_engine(3, depth=2, ahead=True, adapts_drafts=True)
    request = make_request(6, request_id="a", max_tokens=24)
    plans = steps_of(engine, request)
    assert [plan.max_draft_tokens for plan in plans[:5]] == [2, 0, 0, 1, 3]
    assert planned_lengths(plans[:6]) == [[], [2], [], [], [1], [3]]
    assert [plan.num_scheduled_tokens for plan in plans[:6]] == [[6], [3], [1], [1], [2], [4]]
    assert engine.results["a"].token_ids == alone(request)


@pytest.mark.parametrize("knows_before", [True, False])
def test_a_request_with_logits_processors_has_no_placeholders(knows_before):
    """Functions of the request are known when it starts; whether those of the engine act on it, the worker says."""
    engine = make_engine(3, depth=2, ahead=True, propose=lambda tokens: [])
    execute = engine.runner.execute
    engine.runner.execute = lambda plan: msgspec.structs.replace(execute(plan), undrafted=[] if knows_before else [0])
    processors = [lambda ids, logits: logits] if knows_before else None
    plans = steps_of(engine, make_request(6, request_id="a", max_tokens=9, logits_processors=processors))
    before = [] if knows_before else [3]  # planned beside the first step
    assert planned_lengths(plans[:9]) == [[], before, *[[]] * 7]
    assert [plan.num_scheduled_tokens for plan in plans[:9]] == [[6], [1 + sum(before)], *[[1]] * 7]


def test_a_worker_with_fewer_drafts_than_placeholders_says_how_many_it_verified():
    engine = make_engine(4, propose=lambda tokens: following(tokens, len(tokens) % 3), depth=2, ahead=True)
    request = make_request(6, request_id="a", max_tokens=20)
    steps_of(engine, request)
    assert engine.results["a"].token_ids == alone(request)
    stats = engine.scheduler.make_stats()
    assert 0 < stats.num_accepted_tokens == stats.num_draft_tokens <= 2 * stats.num_drafts


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_no_plan_goes_past_the_last_token_if_all_drafts_in_flight_are_accepted(max_tokens, depth):
    engine = make_engine(4, max_model_len=17, depth=depth, ahead=True)
    request = make_request(6, request_id="a", max_tokens=max_tokens)
    steps_of(engine, request)
    result, longest = engine.results["a"], min(max_tokens, 11)
    assert result.finish_reason is FinishReason.LENGTH and result.token_ids == alone(request)[:longest]
    assert engine.runner.num_computed["a"] == 6 + longest - 1  # each token once, the last never


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("at", range(7))
def test_results_of_a_step_behind_a_stop_token_are_dropped(kind, at):
    prompt = [1, 6, 7]
    tokens = following(prompt, 8)
    stopping = {"stop_token_ids": [tokens[at]], "max_tokens": 30, "logprobs": 1, "output_kind": kind}
    engine = make_engine(2, depth=2, ahead=True)
    [result] = engine.run(make_request(prompt, **stopping))
    assert (result.token_ids, result.finish_reason) == (tokens[: at + 1], FinishReason.STOP)
    assert result.logprobs == [logprobs_of(token) for token in tokens[: at + 1]]
    engine.step()
    assert not engine.runner.rows


def _lacks_slots(request: Request) -> bool:
    """Whether a request lacks slots if all of its drafts in flight are accepted."""
    return request.max_num_tokens_in_flight > request.table.num_slots


def test_no_request_is_preempted_for_tokens_that_may_not_exist():
    engine = make_engine(2, depth=2, ahead=True, num_blocks=9, block_size=4, propose=lambda tokens: [49, 49])
    requests = [make_request(3, max_tokens=12), make_request(4, max_tokens=14), make_request(4, max_tokens=14)]
    engine.add(*requests)
    scheduler, num_waits = engine.scheduler, 0
    while scheduler.has_requests():
        before, running = scheduler.make_stats().num_preemptions, scheduler.requests.running
        might = [each for each in running if each.num_drafts_in_flight and _lacks_slots(each)]
        plan = scheduler.schedule()
        waiting = [each for each in might if each.row not in plan.rows]
        if running and waiting[:1] == running[:1]:
            assert scheduler.make_stats().num_preemptions == before
            num_waits += len(running) > 1
        engine.in_flight.append((plan, engine.runner.execute(plan)))
        while len(engine.in_flight) > 1:
            engine.collect()
    assert num_waits and scheduler.make_stats().num_preemptions
    assert [engine.results[each.request_id].token_ids for each in requests] == [alone(each) for each in requests]


def test_a_request_comes_back_with_the_drafts_that_were_accepted_when_it_was_preempted():
    """A pair, which has no drafts, needs the blocks of a request with drafts in flight."""
    engine = make_engine(2, depth=2, ahead=True, num_blocks=8, block_size=4)
    pair = make_request(3, companion=[5] * 3, max_tokens=12)
    requests = [make_request(4, max_tokens=14), make_request(4, max_tokens=14)]
    engine.add(pair, *requests)
    num_seen = 0
    while engine.scheduler.has_requests():
        plan = engine.scheduler.schedule()
        num_seen += any(each.num_drafts_in_flight for each in engine.scheduler.requests.blocked)
        engine.in_flight.append((plan, engine.runner.execute(plan)))
        while len(engine.in_flight) > 1:
            engine.collect()
    assert num_seen
    assert [engine.results[each.request_id].token_ids for each in requests] == [alone(each) for each in requests]


def test_a_row_has_slots_for_its_drafts_in_flight_behind_the_window_of_a_group():
    engine = make_engine(6, depth=2, ahead=True, block_size=2, windows=(None, 3), max_num_batched_tokens=8)
    request = make_request(5, max_tokens=24)
    assert engine.run(request)[0].token_ids == alone(request)


def test_a_request_that_starts_again_has_no_drafts_in_flight():
    """The second request reads blocks that the first should have written, and is in two steps when that one fails."""
    engine = make_engine(3, depth=4, ahead=True, block_size=2)
    prompt = [1, 2, 3, 4, 5, 6]
    first, second = (make_request(prompt, request_id=name, max_tokens=12) for name in "ab")
    engine.runner.failing.add("a")
    engine.add(first)
    engine.step()
    engine.add(second)
    engine.step()
    engine.step()
    state = engine.scheduler.requests.by_id["b"]
    assert state.num_drafts_in_flight == 3
    engine.collect()
    assert (state.num_drafts_in_flight, state.num_tokens) == (0, 6)
    engine.run()
    assert engine.results["b"].token_ids == alone(second)
    assert engine.results["a"].finish_reason is FinishReason.ERROR


def test_drafts_behind_a_token_that_the_next_step_has_computed_are_not_used_again():
    engine = make_engine(3, depth=2, ahead=True, max_num_batched_tokens=8)
    request = make_request(6, request_id="a", max_tokens=24)
    engine.add(request)
    for _ in range(3):
        engine.step()
        [state] = engine.scheduler.requests.running
        assert state.has_token_in_flight and not state.draft_token_ids
    while engine.in_flight:
        engine.collect()
    drafts = state.draft_token_ids
    assert drafts == following(state.token_ids, 3)
    assert list(engine.step().draft_token_ids.values()) == [drafts]  # nothing is in flight: they are known
    engine.run()
    assert engine.results["a"].token_ids == alone(request)


def test_a_request_with_a_grammar_waits_for_its_results():
    scheduler = make_engine(3, depth=2, ahead=True, can_defer_masks=True).scheduler
    scheduler.add_request(make_request(request_id="formed", structured_outputs={"regex": "a"}, max_tokens=9))
    scheduler.start_grammar("formed", Countdown(6))
    scheduler.add_request(make_request(request_id="free", max_tokens=9))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (len(first.rows), len(second.rows)) == (2, 1)
    assert second.rows == [scheduler.requests.by_id["free"].row] and not second.masks_follow
    drafts = {position: [7, 7] for position in range(2)}
    scheduler.update_from_output(first, ModelRunnerOutput(first.step, [7, 7], draft_token_ids=drafts))
    third = scheduler.schedule()
    row = scheduler.requests.by_id["formed"].row
    assert third.draft_token_ids[third.rows.index(row)] == [7, 7] and third.mask_rows == [row] * 3


def test_in_models_with_states_a_plan_ahead_reads_the_slot_that_the_worker_knows():
    """Each step writes the slot of the known tokens again. Only the slots of draft tokens in flight are held."""
    engine = make_engine(3, depth=2, ahead=True, num_state_slots=12, state_snapshot_interval=64)
    requests = [make_request(3, request_id=name, max_tokens=28) for name in "ab"]
    engine.add(requests[0])
    plans = [engine.step() for _ in range(6)]
    assert [plan.write_slots for plan in plans] == [plans[0].write_slots] * 6
    assert [plan.read_slots for plan in plans] == [[-1], plans[0].write_slots, *[[BEHIND_ACCEPTED]] * 4]
    for first, second in pairwise(plan.draft_slots[0] for plan in plans[1:]):
        assert len(first) == len(second) == 3 and not {*first} & {*second}
    state = engine.scheduler.requests.by_id["a"].table.state
    assert len(state.held) == 1 + 3, "those of the last step, which is in flight"
    engine.run(requests[1])
    assert [engine.results[name].token_ids for name in "ab"] == [alone(request) for request in requests]
    assert engine.scheduler._kv_cache.states.num_free == 12


def test_a_request_waits_where_its_state_may_be_kept_behind_a_draft_token():
    engine = make_engine(3, depth=2, ahead=True, num_state_slots=20, block_size=4, state_snapshot_interval=8)
    engine.add(request := make_request(3, max_tokens=28))
    engine.run()
    assert engine.results[request.request_id].token_ids == alone(request)
    assert engine.check_snapshots() == 3, "at every multiple of 8"
