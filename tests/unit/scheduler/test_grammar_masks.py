"""Requests with grammars: they wait for the grammar, and then for the mask of each token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mvllm.messages.requests import FinishReason
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.scheduler.grammar_masks import DEFERRED_MASK_SECONDS
from mvllm.scheduler.scheduler import Scheduler
from tests.unit.scheduler.builders import make_request, make_scheduler

FORM = {"regex": "a"}


class Countdown:
    """A grammar of `length` tokens, whose mask encodes the number of accepted tokens. Token 99 is an error.

    It refuses draft tokens above 49.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.taken: list[int] = []
        self.error: str | None = None
        self.is_ready = True
        self.expected_seconds = 0.0
        self.relaxations: tuple[str, ...] = ()

    @property
    def mask(self) -> bytes:
        return bytes([len(self.taken)] * 4)

    @property
    def is_complete(self) -> bool:
        return len(self.taken) == self.length

    def accept(self, token: int, *, blocking: bool = False) -> None:
        self.taken.append(token)
        if token == 99:
            self.error = "lost its way"

    def draft_masks(self, tokens: Sequence[int]) -> list[bytes]:
        allowed = itertools.takewhile(lambda token: token < 50, tokens)
        return [bytes([len(self.taken) + 1 + i] * 4) for i, _ in enumerate(allowed)]


def answer(scheduler: Scheduler, plan: SchedulerOutput, token: int = 7):
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput(plan.step, [token] * len(plan.rows)))
    scheduler.check_integrity()
    return outputs.outputs


def test_a_request_is_blocked_until_its_grammar_is_compiled() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request(request_id="formed", structured_outputs=FORM))
    assert scheduler.is_waiting_for_masks and scheduler.is_waiting_for_grammar("formed")
    scheduler.add_request(make_request(request_id="free"))
    assert not scheduler.is_waiting_for_masks
    plan = scheduler.schedule()
    assert [new.request_id for new in plan.new_requests] == ["free"] and not plan.mask_rows
    scheduler.start_grammar("formed", Countdown(3))
    assert not scheduler.is_waiting_for_grammar("formed")
    answer(scheduler, plan)
    plan = scheduler.schedule()
    assert [new.request_id for new in plan.new_requests] == ["formed"]
    assert plan.mask_rows == [plan.new_requests[0].row] and plan.token_masks == bytes([0] * 4)


def test_it_can_be_aborted_or_fail_while_it_waits() -> None:
    scheduler = make_scheduler()
    for name in ("aborted", "failed"):
        scheduler.add_request(make_request(request_id=name, structured_outputs=FORM))
    scheduler.abort_requests(["aborted"])
    scheduler.start_grammar("aborted", Countdown(3))
    scheduler.fail_request("aborted", "too late")
    scheduler.check_integrity()
    scheduler.fail_request("failed", "no such thing")
    assert not scheduler.is_waiting_for_masks
    (output,) = answer(scheduler, scheduler.schedule())
    assert (output.request_id, output.finish_reason, output.error) == ("failed", FinishReason.ERROR, "no such thing")
    assert not scheduler.has_requests()


def test_steps_that_sample_have_masks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_request(6, request_id="formed", structured_outputs=FORM, max_tokens=8))
    scheduler.start_grammar("formed", Countdown(3))
    plan = scheduler.schedule()
    assert plan.rows and not plan.mask_rows  # a chunk of the prompt
    answer(scheduler, plan, token=-1)
    masks = []
    while scheduler.has_requests():
        plan = scheduler.schedule()
        masks.append(plan.token_masks)
        outputs = answer(scheduler, plan)
    assert masks == [bytes([i] * 4) for i in range(3)]
    assert outputs[0].finish_reason is FinishReason.STOP


def test_no_step_is_planned_for_it_before_its_last_token_is_known() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request(request_id="formed", structured_outputs=FORM, max_tokens=8))
    scheduler.add_request(make_request(request_id="free", max_tokens=8))
    scheduler.start_grammar("formed", Countdown(5))
    first = scheduler.schedule()
    assert len(first.rows) == 2 and len(first.mask_rows) == 1
    second = scheduler.schedule()
    assert len(second.rows) == 1 and not second.mask_rows
    answer(scheduler, first)
    third = scheduler.schedule()
    assert len(third.rows) == 2 and third.token_masks == bytes([1] * 4)


def test_a_preempted_request_with_a_grammar_continues() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4, enable_caching=False)
    grammar = Countdown(7)
    scheduler.add_request(make_request(5, request_id="free", max_tokens=9))
    scheduler.add_request(make_request(5, request_id="formed", structured_outputs=FORM, max_tokens=9))
    scheduler.start_grammar("formed", grammar)
    seen, ended = [], []
    while scheduler.has_requests():
        plan = scheduler.schedule()
        seen += [plan.token_masks] if plan.mask_rows else []
        ended += [(o.request_id, o.finish_reason) for o in answer(scheduler, plan) if o.finish_reason is not None]
    assert scheduler.make_stats().num_preemptions > 0
    assert seen == [bytes([i] * 4) for i in range(7)] and len(grammar.taken) == 7
    assert ("formed", FinishReason.STOP) in ended


def test_a_grammar_error_fails_only_its_request() -> None:
    scheduler = make_scheduler()
    for name in ("lost", "fine"):
        scheduler.add_request(make_request(request_id=name, structured_outputs=FORM, max_tokens=8))
        scheduler.start_grammar(name, Countdown(6))
    plan = scheduler.schedule()
    lost_first = [99 if new.request_id == "lost" else 7 for new in plan.new_requests]
    outputs = scheduler.update_from_output(plan, ModelRunnerOutput(plan.step, lost_first)).outputs
    scheduler.check_integrity()
    assert [output.finish_reason for output in outputs] == [None, None]
    plan = scheduler.schedule()
    outputs = answer(scheduler, plan)
    assert len(plan.rows) == 1
    assert {(o.request_id, o.error) for o in outputs} == {("lost", "lost its way"), ("fine", None)}


def test_stop_tokens_are_outside_the_grammar_and_max_tokens_ends_it() -> None:
    scheduler = make_scheduler()
    stopped, cut = Countdown(6), Countdown(6)
    scheduler.add_request(make_request(request_id="stopped", structured_outputs=FORM, stop_token_ids=[7], max_tokens=8))
    scheduler.add_request(make_request(request_id="cut", structured_outputs=FORM, max_tokens=1))
    scheduler.start_grammar("stopped", stopped)
    scheduler.start_grammar("cut", cut)
    outputs = {output.request_id: output for output in answer(scheduler, scheduler.schedule())}
    assert outputs["stopped"].finish_reason is FinishReason.STOP and outputs["stopped"].stop_reason == 7
    assert outputs["cut"].finish_reason is FinishReason.LENGTH
    assert stopped.taken == [] and cut.taken == [7]


def test_a_request_takes_part_in_no_step_while_its_mask_is_being_computed() -> None:
    scheduler = make_scheduler()
    grammar = Countdown(5)
    scheduler.add_request(make_request(request_id="formed", structured_outputs=FORM, max_tokens=8))
    scheduler.add_request(make_request(request_id="free", max_tokens=3))
    scheduler.start_grammar("formed", grammar)
    answer(scheduler, scheduler.schedule())
    grammar.is_ready = False
    while len(scheduler.request_ids) == 2:  # the other request runs to its end
        assert not scheduler.is_waiting_for_masks
        plan = scheduler.schedule()
        assert len(plan.rows) == 1 and not plan.mask_rows
        answer(scheduler, plan)
    assert scheduler.request_ids == ["formed"] and scheduler.is_waiting_for_masks
    grammar.is_ready = True
    assert not scheduler.is_waiting_for_masks and len(scheduler.schedule().mask_rows) == 1


def test_a_preempted_request_waits_for_its_mask_without_delaying_others() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4, enable_caching=False)
    grammar = Countdown(9)
    scheduler.add_request(make_request(5, request_id="free", max_tokens=9))
    scheduler.add_request(make_request(5, request_id="formed", structured_outputs=FORM, max_tokens=9))
    scheduler.start_grammar("formed", grammar)
    while not scheduler.make_stats().num_preemptions:
        answer(scheduler, scheduler.schedule())
    grammar.is_ready = False
    scheduler.add_request(make_request(2, request_id="late", max_tokens=1))
    ended: list[str] = []
    while set(ended) != {"late", "free"}:
        plan = scheduler.schedule()
        assert not plan.mask_rows
        ended += [output.request_id for output in answer(scheduler, plan) if output.finish_reason is not None]
    assert scheduler.request_ids == ["formed"] and scheduler.is_waiting_for_masks
    scheduler.fail_request("formed", "of another request with this id", grammar=Countdown(1))
    assert scheduler.request_ids == ["formed"]
    scheduler.fail_request("formed", "too slow", grammar=grammar)
    assert scheduler.pop_outputs()[0].error == "too slow" and not scheduler.has_requests()


class TestDeferredMasks:
    """With workers that support deferred masks, a step is planned before the last token is known."""

    def scheduler(self, **grammars: Countdown) -> Scheduler:
        scheduler = make_scheduler(can_defer_masks=True)
        for name, grammar in grammars.items():
            scheduler.add_request(make_request(request_id=name, structured_outputs=FORM, max_tokens=8))
            scheduler.start_grammar(name, grammar)
        scheduler.add_request(make_request(request_id="free", max_tokens=8))
        return scheduler

    def test_the_next_step_is_planned_before_its_masks_are_known(self) -> None:
        scheduler = self.scheduler(formed=Countdown(8))
        first = scheduler.schedule()
        assert not first.masks_follow and first.token_masks == bytes([0] * 4)
        for num_tokens in range(1, 6):
            second = scheduler.schedule()
            assert second.masks_follow and len(second.rows) == 2 and not second.mask_rows
            answer(scheduler, first)
            assert scheduler.masks_for(second) == (first.rows[:1], bytes([num_tokens] * 4))
            first = second

    def test_a_finished_request_has_no_mask_and_no_further_token(self) -> None:
        scheduler = self.scheduler(short=Countdown(1), long=Countdown(8))
        first = scheduler.schedule()
        second = scheduler.schedule()
        assert len(second.rows) == 3
        assert "short" in [o.request_id for o in answer(scheduler, first) if o.finish_reason is FinishReason.STOP]
        rows, masks = scheduler.masks_for(second)
        assert rows == [second.rows[1]] and masks == bytes([1] * 4)
        third = scheduler.schedule()
        assert len(third.rows) == 2
        assert {o.request_id for o in answer(scheduler, second)} == {"long", "free"}

    def test_each_of_256_rows_advances_in_every_step(self) -> None:
        grammars = {f"formed {i}": Countdown(100) for i in range(256)}
        for grammar in grammars.values():
            grammar.expected_seconds = 60e-6
        scheduler = make_scheduler(
            can_defer_masks=True, max_num_seqs=512, num_blocks=4096, max_num_batched_tokens=8192, max_model_len=128
        )
        for i in range(256):
            scheduler.add_request(make_request(request_id=f"formed {i}", structured_outputs=FORM, max_tokens=50))
            scheduler.start_grammar(f"formed {i}", grammars[f"formed {i}"])
            scheduler.add_request(make_request(request_id=f"free {i}", max_tokens=50))
        plan = scheduler.schedule()
        for step in range(1, 21):
            following = scheduler.schedule()
            answer(scheduler, plan)
            rows, masks = scheduler.masks_for(following)
            assert len(following.rows) == 512 and len(rows) == 256 and masks == bytes([step] * 4) * 256
            plan = following

    def test_expensive_masks_are_not_deferred(self) -> None:
        cheap, expensive = Countdown(8), Countdown(8)
        expensive.expected_seconds = 2 * DEFERRED_MASK_SECONDS
        scheduler = self.scheduler(cheap=cheap, expensive=expensive)
        first = scheduler.schedule()
        second = scheduler.schedule()
        assert second.rows == [first.rows[0], first.rows[2]] and second.masks_follow
        answer(scheduler, first)
        assert scheduler.masks_for(second)[0] == first.rows[:1]
        assert len(scheduler.schedule().rows) == 3
