"""Admission of requests with LoRA adapters: a limited number of adapters, no starvation, and no shared blocks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.messages.lora import LoRARequest
from mvllm.messages.requests import EngineCoreRequest
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.scheduler.scheduler import Scheduler
from tests.unit.scheduler.builders import make_request, make_scheduler


def with_adapter(number: int, **options: object) -> EngineCoreRequest:
    request = make_request(**options)  # type: ignore[arg-type]
    if number:
        request.lora_request = LoRARequest(f"adapter-{number}", number, f"/adapters/{number}")
    return request


def answer(scheduler: Scheduler, plan: SchedulerOutput) -> list[str]:
    """Executes a plan; returns the finished requests."""
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput(plan.step, [7] * len(plan.rows)))
    scheduler.check_integrity()
    return [output.request_id for output in outputs.outputs if output.finish_reason is not None]


def started(plan: SchedulerOutput) -> list[str]:
    return [new.request_id for new in plan.new_requests]


def test_requests_without_a_lora_slot_wait_and_others_bypass_them() -> None:
    scheduler = make_scheduler(max_loras=2)
    for name, number in (("a", 1), ("b", 2), ("c", 3), ("a2", 1), ("base", 0), ("d", 4)):
        scheduler.add_request(with_adapter(number, request_id=name, max_tokens=2))
    plan = scheduler.schedule()
    assert started(plan) == ["a", "b", "a2", "base"]
    assert [new.lora_request and new.lora_request.lora_int_id for new in plan.new_requests] == [1, 2, 1, None]
    assert scheduler.running_lora_ids == {1, 2}
    answer(scheduler, plan)
    plan = scheduler.schedule()
    assert not started(plan)
    assert set(answer(scheduler, plan)) == {"a", "b", "a2", "base"}
    assert started(scheduler.schedule()) == ["c", "d"]


def test_a_request_that_waits_for_a_slot_is_bypassed_a_limited_number_of_times() -> None:
    scheduler = make_scheduler(max_loras=1, max_num_seqs=2)
    scheduler.add_request(with_adapter(1, request_id="first", max_tokens=2))
    answer(scheduler, scheduler.schedule())
    scheduler.add_request(with_adapter(2, request_id="patient"))
    overtaking = 0
    for number in range(100):  # a request of the other adapter is always available
        scheduler.add_request(with_adapter(1, request_id=f"other-{number}", max_tokens=2))
        plan = scheduler.schedule()
        if "patient" in started(plan):
            break
        overtaking += len(started(plan))
        answer(scheduler, plan)
    else:
        raise AssertionError("it waits forever")
    assert overtaking == 4 * 2


def test_a_preempted_request_frees_its_lora_slot() -> None:
    scheduler = make_scheduler(max_loras=1, num_blocks=6, block_size=4)
    for name, number in (("old", 0), ("young", 1)):
        scheduler.add_request(with_adapter(number, request_id=name, prompt=8, max_tokens=12))
    done: list[str] = []
    saw_preemption = False
    while scheduler.has_requests():
        plan = scheduler.schedule()
        saw_preemption |= scheduler.make_stats().num_preemptions > 0 and not scheduler.running_lora_ids
        done += answer(scheduler, plan)
    assert saw_preemption and sorted(done) == ["old", "young"]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=30),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_every_request_ends_and_no_step_has_too_many_adapters(
    requests: list[tuple[int, int, int]], max_loras: int, max_num_seqs: int
) -> None:
    scheduler = make_scheduler(max_loras=max_loras, max_num_seqs=max_num_seqs, num_blocks=8, max_num_batched_tokens=128)
    for number, prompt, max_tokens in requests:
        scheduler.add_request(with_adapter(number, prompt=prompt, max_tokens=max_tokens))
    num_ended = 0
    for _ in range(1000):
        if not scheduler.has_requests():
            break
        plan = scheduler.schedule()
        assert len(scheduler.running_lora_ids) <= max_loras
        num_ended += len(answer(scheduler, plan))
    assert num_ended == len(requests)


_TEXTS = st.text(st.sampled_from("ab|1 ,"), max_size=4)


@settings(max_examples=60)
@given(*[st.tuples(st.none() | _TEXTS, st.none() | st.tuples(_TEXTS, st.integers(1, 12), _TEXTS))] * 2)
def test_blocks_are_shared_by_equal_salt_and_adapter_alone(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    def root(salt: str | None, adapter: tuple[str, int, str] | None) -> bytes | None:
        keys = () if adapter is None else LoRARequest(*adapter).cache_keys
        return cache.make_table([1, 2, 3], cache_salt=salt, adapter_keys=keys).root

    cache = KVCacheManager(num_blocks=2, block_size=4, hash_seed=0)
    assert (root(*one) == root(*other)) == (one == other)
