"""Random traffic under random limits: tokens do not depend on the schedule, and no resource leaks.

Three checks run: the scheduler's `check_integrity` and the fake runner's check of KV in each step, and at the end the
comparison with the tokens of each request alone.
"""

import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvllm.errors import RequestError
from mvllm.messages.requests import FinishReason
from mvllm.messages.sampling_params import RequestOutputKind
from tests.unit.scheduler.builders import Engine, companion_prompt, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens, logprobs_of

MAX_MODEL_LEN = 32


@dataclass
class Limits:
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    enable_caching: bool
    policy: str
    depth: int
    num_stages: int
    windows: tuple[int | None, ...]
    long_prefill_token_threshold: int | None
    long_prefill_slowdown: float | None

    @property
    def num_batched_tokens(self) -> int:
        least = 0 if self.enable_chunked_prefill else MAX_MODEL_LEN
        return max(self.max_num_batched_tokens, least)

    def can_pair(self, request) -> bool:
        prompts = request.prompt_token_ids, companion_prompt(request)
        room = MAX_MODEL_LEN - max(map(len, prompts))
        longest = sum(map(len, prompts)) + 2 * min(room, request.sampling_params.max_tokens or room)
        fits = self.enable_chunked_prefill or longest <= self.num_batched_tokens
        return self.max_num_seqs > 1 and self.num_batched_tokens > 1 and fits

    def make_engine(self) -> Engine:
        settings = {name: value for name, value in vars(self).items() if name != "depth"}
        settings["max_num_batched_tokens"] = self.num_batched_tokens
        ticks = itertools.count()
        scheduler = make_scheduler(max_model_len=MAX_MODEL_LEN, clock=lambda: next(ticks) % 97 + 0.01, **settings)
        return Engine(scheduler, depth=self.depth)


limits = st.builds(
    Limits,
    num_blocks=st.integers(8, 24),
    block_size=st.sampled_from([1, 2, 4, 5]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 40),
    enable_chunked_prefill=st.booleans(),
    enable_caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    depth=st.integers(1, 4),
    num_stages=st.integers(1, 4),
    windows=st.sampled_from([(None,), (None,), (None,), (1,), (3,), (7,), (None, 4), (2, 9), (None, None, 5, 5)]),
    long_prefill_token_threshold=st.sampled_from([None, None, 0, 1, 3, 8]),
    long_prefill_slowdown=st.sampled_from([None, None, 1.01, 3.0]),
)

requests = st.fixed_dictionaries(
    {
        # Few distinct tokens, so that prompts share prefixes of all lengths.
        "prompt": st.lists(st.sampled_from([1, 1, 1, 1, 2]), min_size=1, max_size=24),
        "max_tokens": st.one_of(st.none(), st.integers(1, 12)),
        "min_tokens": st.integers(0, 3),
        "eos": st.sampled_from([[], [7], list(range(0, 50, 6))]),
        "stop_token_ids": st.sampled_from([None, [3], list(range(1, 50, 7))]),
        "priority": st.integers(-1, 1),
        "cache_salt": st.sampled_from([None, None, "a", "b"]),
        "sibling_group": st.sampled_from([None, "g", "h"]),
        "logprobs": st.sampled_from([None, 1]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "output_kind": st.sampled_from(list(RequestOutputKind)),
        "companion": st.one_of(
            st.none(), st.none(), st.lists(st.sampled_from([1, 1, 1, 1, 2]), min_size=1, max_size=24)
        ),
    }
).filter(lambda request: request["min_tokens"] <= (request["max_tokens"] or MAX_MODEL_LEN))

actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("fail"), st.integers(0, 61)),  # from 31 on, the companion of a request
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=250)
@given(limits, actions)
def test_any_traffic_gives_the_tokens_of_each_request_alone(limits, actions):
    engine, added, aborted = limits.make_engine(), {}, set()
    for action, argument in actions:
        name = f"r{argument % 31}" if isinstance(argument, int) else ""
        if action == "add":
            request = make_request(**argument, request_id=f"r{len(added)}")
            if request.pair is not None and not limits.can_pair(request):
                with pytest.raises(RequestError, match=r"^scale needs two rows|chunked prefill"):
                    engine.scheduler.add_request(request)
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
    for request in added.values():  # again, with the current cache: it must contain no blocks of a failed request
        request.request_id += "-again"
        engine.run(request)
        check_result(engine, request, limits, ended_early=False, may_fail=False)
    engine.step()
    assert not engine.runner.rows


def check_result(engine, request, limits, *, ended_early, may_fail):
    result = engine.results[request.request_id]
    params = request.sampling_params
    companion = companion_prompt(request)
    expected = expected_tokens(
        request.prompt_token_ids, params, request.eos_token_ids, MAX_MODEL_LEN, companion=companion
    )
    prompts = [request.prompt_token_ids] if companion is None else [request.prompt_token_ids, companion]
    if ended_early:
        assert result.finish_reason is None
        assert result.token_ids == expected[: len(result.token_ids)]
        return
    if result.finish_reason is FinishReason.ERROR:
        kv_cache = engine.scheduler._kv_cache
        num_blocks = sum(kv_cache.blocks_for(len(prompt) + len(expected) - 1) for prompt in prompts)
        assert may_fail or num_blocks > kv_cache.num_blocks, result.outputs[-1].error
        assert result.token_ids == expected[: len(result.token_ids)]
        return
    assert result.token_ids == expected
    stops = {*request.eos_token_ids, *(params.stop_token_ids or [])}
    stopped = expected[-1] in stops and len(expected) >= params.min_tokens
    assert result.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    if params.logprobs is not None:
        assert result.logprobs == [logprobs_of(token) for token in expected]
        assert result.conditional_logprobs == ([] if companion is None else [-0.5 * token for token in expected])
    if params.prompt_logprobs is not None:
        assert result.prompt_logprobs == [logprobs_of(token) for token in request.prompt_token_ids[1:]]
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        assert len(result.outputs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("depth", "policy", "enable_caching"), [(1, "fcfs", True), (2, "priority", False)])
def test_thousands_of_requests_leave_no_block_row_or_request_behind(depth, policy, enable_caching, count):
    dice = random.Random(0)
    engine = Engine(
        make_scheduler(
            num_blocks=12,
            block_size=4,
            max_num_seqs=16,
            max_num_batched_tokens=48,
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
            enable_caching=enable_caching,
        ),
        depth=depth,
    )
    num_added, alive = 0, []
    while num_added < count:
        for _ in range(dice.randrange(4)):
            prompt = [dice.randrange(2)] * dice.randrange(1, 12) + [dice.randrange(9)]
            group = f"g{num_added // 3}" if dice.random() < 0.3 else None
            engine.add(
                make_request(
                    prompt,
                    request_id=f"r{num_added}",
                    max_tokens=dice.randrange(1, 10),
                    eos=[3],
                    priority=dice.randrange(3),
                    cache_salt=dice.choice([None, "a"]),
                    sibling_group=group,
                    prompt_logprobs=dice.choice([None, None, None, 0]),
                )
            )
            alive.append(f"r{num_added}")
            num_added += 1
        if dice.random() < 0.2:
            engine.scheduler.abort_requests(dice.sample(alive, min(3, len(alive))))
        if dice.random() < 0.02:
            engine.runner.failing.add(dice.choice(alive))
        for _ in range(dice.randrange(5)):
            engine.step()
        alive = alive[-60:]
    engine.run()
    stats = engine.scheduler.make_stats()
    assert stats.num_preemptions > count // 500
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert engine.scheduler.reset_prefix_cache()
    engine.step()
    engine.run()
    assert not engine.runner.rows
    assert not engine.scheduler.requests.by_id and not engine.scheduler._batches and not engine.scheduler._prompt_starts
    assert engine.scheduler.requests.num_prompt_logprobs == 0
