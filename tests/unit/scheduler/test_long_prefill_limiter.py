"""Long prompts leave budget for other requests, and use the budget that others leave."""

import pytest

from mvllm.messages.requests import FinishReason
from mvllm.scheduler.step_time_model import StepTimeModel
from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.simulated_load import SimulatedLoad, StepCost

LONG = 200


def make_engine(**options: object) -> Engine:
    return Engine(
        make_scheduler(
            num_blocks=1024, max_num_batched_tokens=20, max_model_len=1024, **{"max_num_seqs": 16, **options}
        )
    )


def scheduled(engine: Engine) -> dict[str, int]:
    """Runs one step; returns how many tokens each request computes in it."""
    names = {request.row: request.request_id for request in engine.scheduler.requests.running}
    plan = engine.step()
    names |= {new.row: new.request_id for new in plan.new_requests}
    return {names[row]: count for row, count in zip(plan.rows, plan.num_scheduled_tokens, strict=True)}


def test_a_single_long_prompt_gets_the_whole_budget():
    engine = make_engine()
    engine.add(make_request(LONG, request_id="long"))
    assert [scheduled(engine) for _ in range(11)] == [{"long": 20}] * 10 + [{"long": 1}]


def test_a_later_short_request_has_its_first_token_in_its_first_step():
    engine = make_engine()
    engine.add(make_request(LONG, request_id="long"))
    scheduled(engine)
    engine.add(make_request(7, request_id="short"))
    assert scheduled(engine) == {"long": 13, "short": 7}
    assert len(engine.results["short"].token_ids) == 1
    assert scheduled(engine) == {"long": 19, "short": 1}


def test_a_long_prompt_keeps_its_share_for_any_number_of_other_requests():
    engine = make_engine()
    engine.add(make_request(LONG, request_id="long"))
    for i in range(12):
        engine.add(make_request(8, request_id=f"short-{i}", max_tokens=1))
    assert scheduled(engine) == {"long": 10, "short-0": 8, "short-1": 2}
    assert [scheduled(engine)["long"] for _ in range(8)] == [10] * 8


def test_decoding_requests_behind_a_long_prompt_continue():
    engine = make_engine(policy="priority")
    engine.add(*[make_request(2, request_id=f"r{i}", max_tokens=30) for i in range(6)])
    scheduled(engine)
    engine.add(make_request(LONG, request_id="long", priority=-1))
    for _ in range(5):
        assert scheduled(engine) == {**{f"r{i}": 1 for i in range(6)}, "long": 14}


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)])
def test_long_prompts_are_computed_one_after_the_other_with_the_whole_budget(windows):
    engine = make_engine(windows=windows)
    engine.add(*[make_request(45, request_id=f"long-{i}", max_tokens=1) for i in range(4)])
    steps = [scheduled(engine) for _ in range(9)]
    assert [sum(step.values()) for step in steps] == [20] * 9, "180 tokens"
    assert steps[:3] == [{"long-0": 20}, {"long-0": 20}, {"long-0": 5, "long-1": 15}]
    engine.run()
    assert {result.finish_reason for result in engine.results.values()} == {FinishReason.LENGTH}


def test_a_short_prompt_bypasses_waiting_long_prompts():
    engine = make_engine()
    engine.add(*[make_request(LONG, request_id=f"long-{i}") for i in range(3)])
    for _ in range(10):
        scheduled(engine)
    engine.add(make_request(3, request_id="a", max_tokens=1))
    assert scheduled(engine) == {"long-0": 1, "long-1": 16, "a": 3}
    engine.add(make_request(4, request_id="b", max_tokens=1))
    assert scheduled(engine) == {"long-0": 1, "long-1": 15, "b": 4}


def test_without_a_limit_prompts_are_computed_in_the_order_of_service():
    engine = make_engine(long_prefill_token_threshold=0)
    engine.add(make_request(LONG, request_id="long"), make_request(7, request_id="short"))
    assert [scheduled(engine) for _ in range(10)] == [{"long": 20}] * 10


def test_a_long_prompt_that_is_mostly_cached_counts_as_short():
    engine = make_engine()
    [first] = [make_request(60)]
    engine.run(first)
    engine.add(make_request(LONG, request_id="long"))
    scheduled(engine)
    engine.add(make_request([*first.prompt_token_ids, 1, 2, 3], request_id="cached"))
    assert scheduled(engine) == {"long": 17, "cached": 3}


def test_long_prompts_that_wait_are_not_looked_up_in_every_step():
    engine = make_engine()
    engine.add(*[make_request(LONG, request_id=f"long-{i}") for i in range(8)])
    scheduled(engine)
    kv_cache, looks = engine.scheduler._kv_cache, []
    find = kv_cache.find_prefix
    kv_cache.find_prefix = lambda table: looks.append(table) or find(table)
    for _ in range(5):
        scheduled(engine)
    assert not looks


def test_with_few_blocks_for_a_window_every_scheduled_token_has_a_slot():
    limits = {"max_num_batched_tokens": 2, "max_model_len": 32, "block_size": 5, "windows": (7,)}
    engine = Engine(make_scheduler(num_blocks=15, **limits))
    engine.run(make_request(17, request_id="long"))  # checks after each step that computed tokens have slots
    assert engine.results["long"].finish_reason is FinishReason.LENGTH


def test_a_configured_threshold_is_a_cap_in_steps_in_which_others_generate():
    engine = make_engine(long_prefill_token_threshold=6)
    engine.add(make_request(4, request_id="decoding", max_tokens=60))
    scheduled(engine)
    engine.add(*[make_request(40, request_id=f"long-{i}", max_tokens=1) for i in range(2)])
    for _ in range(6):
        assert scheduled(engine) == {"decoding": 1, "long-0": 6}
    assert scheduled(engine) == {"decoding": 1, "long-0": 4, "long-1": 6}
    engine.scheduler.abort_requests(["decoding"])
    assert scheduled(engine) == {"long-1": 20}, "nobody waits for a token"


class TestTimeOfSteps:
    """A very long prompt makes the steps of generating requests at most `long_prefill_slowdown` times as long."""

    @pytest.mark.parametrize("output_tokens", [(100, 300), (3000, 3400)], ids=["chats come and go", "chats go on"])
    @pytest.mark.parametrize(
        "cost", [StepCost(8e-3, 30e-6, 1e-10), StepCost(60e-3, 1e-3)], ids=["accelerator", "processor"]
    )
    def test_chats_beside_a_prompt_of_100_000_tokens(self, cost, output_tokens):
        times = {"output_tokens": output_tokens, "warm_up": 600 * cost.base, "max_seconds": 2000 * cost.base}
        alone = SimulatedLoad(cost, long_prefill_slowdown=1.5, **times).run()
        times["max_seconds"] *= 10
        beside = SimulatedLoad(cost, long_prefill_slowdown=1.5, long_prompts=(100_000,), **times).run()
        assert beside.p99() <= 1.5 * alone.p99()
        assert beside.long_prompts, "it ends"
        times["max_seconds"] /= 10
        unlimited = SimulatedLoad(cost, long_prompts=(100_000,), **times).run()
        assert unlimited.p99() > 1.5 * alone.p99()

    def test_without_generating_requests_it_gets_whole_steps(self):
        cost = StepCost(8e-3, 30e-6)
        [seconds] = (
            SimulatedLoad(cost, num_chats=0, long_prompts=(100_000,), warm_up=0.0, long_prefill_slowdown=1.5)
            .run()
            .long_prompts
        )
        assert seconds == pytest.approx(49 * cost.base + 100_000 * cost.per_token)

    def test_with_more_of_them_waiting_each_gets_more(self):
        cost = StepCost(8e-3, 30e-6)
        limits = {"long_prefill_slowdown": 1.5, "max_seconds": 1000.0}
        [one] = SimulatedLoad(cost, long_prompts=(50_000,), **limits).run().long_prompts
        four = SimulatedLoad(cost, long_prompts=(50_000,) * 4, **limits).run().long_prompts
        assert max(four) < 3.5 * one

    def test_a_slow_first_step_is_forgotten(self):
        model = StepTimeModel()
        assert model.prompt_tokens_within(1.5) is None
        for seconds in (30.0, *[0.01] * 30):
            model.add_step(0, seconds)
        for _ in range(30):
            model.add_step(100, 0.02, is_ordinary=False)
        assert 45 <= model.prompt_tokens_within(1.5) <= 55

    def test_where_chats_have_longer_steps_anyway_it_gets_more(self):
        def tokens_within(decode: float, with_prompts: float) -> int | None:
            model = StepTimeModel()
            for i in range(300):
                model.add_step(*((100, with_prompts) if i % 10 == 9 else (0, decode)))
            for _ in range(60):  # 0.1 ms a token
                model.add_step(100, decode + 0.01, is_ordinary=False)
            return model.prompt_tokens_within(1.5)

        assert 45 <= tokens_within(0.01, 0.01) <= 55
        assert 75 <= tokens_within(0.01, 0.018) <= 85, "no longer than the longest steps"
        assert 85 <= tokens_within(0.01, 0.05) <= 105, "no longer than 20 ms"
        assert tokens_within(0.1, 0.2) > 1.05 * tokens_within(0.1, 0.1), "a share of the average, not of the shortest"

    def test_now_and_then_a_step_without_prompts_renews_the_estimate(self):
        model = StepTimeModel()
        model.add_step(0, 0.01)
        for _ in range(65):
            model.add_step(100, 0.02)
        assert [model.prompt_tokens_within(1.5) for _ in range(2)] == [0, 0], "a question changes nothing"
        model.start_pause()
        assert model.prompt_tokens_within(1.5) > 0

    def test_prompts_that_never_cost_time_are_computed_although_the_average_tends_to_0(self):
        model = StepTimeModel()
        model.add_step(0, 1.0)
        model.add_step(100, 1.2)
        for _ in range(7000):
            model.add_step(100, 0.05)
        assert model.prompt_tokens_within(1.5) == 0
        model.start_pause()
        assert model.prompt_tokens_within(1.5) > 0
