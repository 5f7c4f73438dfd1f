"""Items of prompts in the scheduler: encoder runs, the encoder cache, ends of chunks, and the prefix cache."""

from __future__ import annotations

import random

import pytest

from mvllm.errors import RequestError
from mvllm.kv_cache.host_tier import HostTier
from mvllm.messages.multimodal import ItemSpan, MultiModalItem
from mvllm.messages.requests import EngineCoreRequest, FinishReason
from tests.unit.scheduler.builders import Engine, make_encoders, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens
from tests.unit.scheduler.item_runner import PLACEHOLDER, ItemRunner, make_item, shown_ids, spans_of

MAX_MODEL_LEN = 64


def make_engine(depth: int = 1, encoders: dict | None = None, **limits) -> Engine:
    limits = {"max_model_len": MAX_MODEL_LEN} | limits
    given = {name: limits[name] for name in ("max_num_batched_tokens", "max_model_len") if name in limits}
    planner = make_encoders(**given | (encoders or {}))
    engine = Engine(make_scheduler(encoders=planner, **limits), depth=depth, make_runner=ItemRunner)
    engine.runner.keeps_spans_whole = planner.keeps_spans_whole
    engine.runner.reads_always = planner.has_cross_attention
    return engine


def prompt_with(*parts: int | tuple[str, int], **fields) -> EngineCoreRequest:
    """A request: numbers are so many tokens of text, pairs are items and their lengths."""
    ids, items = [], []
    for part in parts:
        if isinstance(part, int):
            ids += [1 + i % 3 for i in range(part)]
        else:
            items.append(make_item(part[0], len(ids), part[1]))
            ids += [PLACEHOLDER] * part[1]
    return make_request(ids, items=items, **fields)


def expected(request: EngineCoreRequest) -> list[int]:
    ids = shown_ids(request.prompt_token_ids, spans_of(request))
    return expected_tokens(ids, request.sampling_params, request.eos_token_ids, MAX_MODEL_LEN)


def test_an_item_is_encoded_once_for_two_requests() -> None:
    engine = make_engine()
    first, second = prompt_with(3, ("cat", 6), 2), prompt_with(5, ("cat", 6), 4)
    results = engine.run(first, second)
    assert [result.token_ids for result in results] == [expected(first), expected(second)]
    assert len(engine.runner.encoded) == 1
    stats = engine.scheduler.make_stats()
    assert (stats.encoder_cache_queries, stats.encoder_cache_hits, stats.encoder_cache_rows) == (2, 1, 6)


def test_a_chunk_ends_before_an_item_that_does_not_fit_into_the_step() -> None:
    engine = make_engine(encoders={"step_tokens": 8})
    request = prompt_with(3, ("cat", 6), 2, ("dog", 6), 1)
    engine.add(request)
    assert engine.step().num_scheduled_tokens == [11]
    assert engine.step().num_scheduled_tokens == [7]
    assert engine.run(prompt_with(4)) and engine.results[request.request_id].token_ids == expected(request)


def test_an_item_with_more_rows_than_a_step_may_encode_is_encoded_alone() -> None:
    engine = make_engine(encoders={"step_tokens": 4})
    request = prompt_with(("cat", 3), ("dog", 9), ("cow", 1))
    engine.add(request)
    plans = [engine.step() for _ in range(3)]
    assert [plan.num_scheduled_tokens for plan in plans] == [[3], [9], [1]]
    assert [len(plan.encoder_inputs) for plan in plans] == [1, 1, 1]


def test_the_result_of_an_item_that_is_read_in_part_is_kept() -> None:
    engine = make_engine(max_num_batched_tokens=6, encoders={"cache_tokens": 10})
    first, second = prompt_with(2, ("cat", 9), 1), prompt_with(1, ("dog", 9), 1)
    results = engine.run(first, second)
    assert [result.token_ids for result in results] == [expected(first), expected(second)]
    assert len(engine.runner.encoded) == 2  # never encoded again, although the cache holds only one of them


def test_the_least_recently_used_result_is_dropped() -> None:
    engine = make_engine(encoders={"cache_tokens": 12})
    for name in ("cat", "dog", "cat", "cow", "cat"):
        engine.run(prompt_with(2, (name, 6), 1, cache_salt=f"{name}{len(engine.results)}"))
    assert len(engine.runner.encoded) == 3
    engine.run(prompt_with(2, ("dog", 6), 1, cache_salt="again"))
    assert len(engine.runner.encoded) == 4


def test_a_reset_keeps_the_results_that_requests_read() -> None:
    engine = make_engine(max_num_batched_tokens=6)
    engine.run(prompt_with(2, ("dog", 6), 1))
    reading = prompt_with(2, ("cat", 9), 1)
    engine.add(reading)
    engine.step()
    assert not engine.scheduler.reset_encoder_cache()
    assert engine.scheduler.make_stats().encoder_cache_rows == 9
    engine.run()
    assert engine.results[reading.request_id].token_ids == expected(reading)
    assert engine.scheduler.reset_encoder_cache() and not engine.scheduler.make_stats().encoder_cache_rows
    engine.run(prompt_with(2, ("dog", 6), 1, cache_salt="again"))
    assert len(engine.runner.encoded) == 3


@pytest.mark.parametrize("shared", [3, 7, 12])
def test_a_cached_prefix_may_end_before_in_and_after_an_item(shared: int) -> None:
    engine = make_engine(block_size=1)
    ids = prompt_with(4, ("cat", 6), 6).prompt_token_ids
    first = make_request(ids[:shared] + [7] * (16 - shared), items=[make_item("cat", 4, 6)] if shared > 4 else [])
    if 4 < shared < 10:
        first.prompt_token_ids[shared:10] = [PLACEHOLDER] * (10 - shared)
        first = make_request([*ids[:4], *[PLACEHOLDER] * 6], items=[make_item("cat", 4, 6)], max_tokens=1)
    engine.run(first)
    num_runs = len(engine.runner.encoded)
    second = prompt_with(4, ("cat", 6), 6)
    [result] = engine.run(second)
    assert result.token_ids == expected(second) and result.num_cached_tokens >= min(shared, 9)
    assert len(engine.runner.encoded) == 1 and num_runs <= 1


def test_the_same_text_with_another_item_is_not_found_in_the_cache() -> None:
    engine = make_engine(block_size=2)
    first, second = prompt_with(4, ("cat", 6), 6), prompt_with(4, ("dog", 6), 6)
    results = engine.run(first)
    results += engine.run(second)
    assert [result.token_ids for result in results] == [expected(first), expected(second)]
    assert results[1].num_cached_tokens == 4
    assert engine.run(prompt_with(4, ("cat", 6), 6))[0].num_cached_tokens == 14


def test_a_preempted_request_encodes_again_what_was_dropped() -> None:
    engine = make_engine(num_blocks=8, encoders={"cache_tokens": 8}, enable_caching=False)
    requests = [prompt_with(1, ("cat", 8), 1, max_tokens=8), prompt_with(1, ("dog", 8), 1, max_tokens=8)]
    results = engine.run(*requests)
    assert [result.token_ids for result in results] == list(map(expected, requests))
    assert engine.scheduler.make_stats().num_preemptions > 0


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_swapped_request_encodes_only_what_it_still_reads(depth: int, both_ways: bool) -> None:
    """Of `b`, the last to come, the blocks of the first image are in host memory, and those of the second are not."""
    engine = make_engine(
        depth,
        num_blocks=15,
        max_num_batched_tokens=14,
        encoders={"cache_tokens": 9, "both_ways": both_ways},
        host_tier=HostTier(32),
        preemption_mode="swap",
    )
    first = prompt_with(6, ("cow", 5), 3, request_id="a", max_tokens=26)
    second = prompt_with(3, ("cat", 6), 2, ("dog", 6), 5, request_id="b", max_tokens=12)
    engine.add(first, second)
    names = {item.span.content_hash: name for item, name in zip([*first.items, *second.items], ("cow", "cat", "dog"))}
    while not engine.scheduler.make_stats().num_swapped:
        engine.step()
    before = [names[each] for each in engine.runner.encoded]
    engine.run()
    assert before == ["cow", "cat", "dog"]
    assert [names[each] for each in engine.runner.encoded] == before
    for request in (first, second):
        assert engine.results[request.request_id].token_ids == expected(request)
    assert engine.scheduler.make_stats().num_preemptions > 0


def test_spans_that_attend_both_ways_are_never_cut() -> None:
    engine = make_engine(max_num_batched_tokens=10, encoders={"both_ways": True})
    requests = [prompt_with(6, ("cat", 8), 3), prompt_with(7, ("dog", 5), ("cow", 4), 2), prompt_with(12)]
    results = engine.run(*requests)
    assert [result.token_ids for result in results] == list(map(expected, requests))


def test_a_span_that_attends_both_ways_must_fit_into_a_step() -> None:
    engine = make_engine(max_num_batched_tokens=6, encoders={"both_ways": True})
    with pytest.raises(RequestError, match=r"8 tokens.*both directions.*max_num_batched_tokens is 6"):
        engine.scheduler.add_request(prompt_with(6, ("cat", 8), 3))


def test_frames_that_attend_both_ways_may_be_in_different_steps() -> None:
    engine = make_engine(max_num_batched_tokens=6, encoders={"both_ways": True})
    request = prompt_with(3, ("video", 12), 2)
    item = request.items[0]
    item.span.embedded, item.num_encoded = [(0, 4), (5, 11)], 10
    engine.add(request)
    assert [engine.step().num_scheduled_tokens for _ in range(4)] == [[3], [5], [6], [3]]
    engine.run()
    assert engine.results[request.request_id].token_ids == expected(request)


@pytest.mark.parametrize("modality", ["embeds", "audio"])
def test_ready_embeddings_and_audio_are_causal_and_may_be_cut(modality: str) -> None:
    engine = make_engine(max_num_batched_tokens=6, encoders={"both_ways": True})
    engine.runner.keeps_spans_whole = False
    request = prompt_with(2, ("cat", 8), 3)
    request.items[0].modality = modality
    engine.add(request)
    first = engine.step()
    assert first.num_scheduled_tokens == [6]
    assert [span.is_causal for span in first.new_requests[0].items] == [True]
    engine = make_engine(encoders={"both_ways": True})
    engine.add(prompt_with(2, ("dog", 3), 1))
    assert [span.is_causal for span in engine.step().new_requests[0].items] == [False]


def test_an_item_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(RequestError, match=r"17 embeddings, but the encoder cache has room for 16"):
        make_engine().scheduler.add_request(prompt_with(6, ("cat", 17), 3))


def test_rotary_positions_that_advance_faster_than_the_sequence_end_the_request_earlier() -> None:
    engine = make_engine(max_model_len=30)
    request = prompt_with(4, ("video", 6), 2, max_tokens=None)
    request.items[0].span.rope_length = 16
    [result] = engine.run(request)
    assert len(result.token_ids) == 30 - 10 - 12
    request.items[0].span.rope_length = 27
    with pytest.raises(RequestError, match=r"positions .* end at 33, but max_model_len is 30"):
        engine.scheduler.add_request(request)


def test_rotary_positions_of_the_text_behind_items_are_below_max_model_len() -> None:
    engine = make_engine(max_model_len=30)
    request = prompt_with(4, ("video", 6), 12)
    request.items[0].span.rope_length = 16
    with pytest.raises(RequestError, match=r"positions .* end at 32, but max_model_len is 30"):
        engine.scheduler.add_request(request)
    request.items[0].span.rope_length = 13
    [result] = engine.run(request)
    assert len(result.token_ids) == 1


@pytest.mark.parametrize(
    "span",
    [
        make_item("cat", 12, 4).span,  # behind the prompt's end
        make_item("cat", 2, 4).span,  # over the other item
        ItemSpan(b"x" * 32, 8, 4, [(0, 5)]),
        ItemSpan(b"x" * 32, 8, 4, [(2, 4), (1, 2)]),
        ItemSpan(b"short", 8, 4, [(0, 4)]),
        ItemSpan(b"x" * 32, 8, 4, [(0, 3)]),  # fewer rows than the encoder gives
    ],
)
def test_spans_that_do_not_fit_are_refused(span: ItemSpan) -> None:
    request = prompt_with(2, ("dog", 4), 8)
    request.items.append(MultiModalItem("image", span, 4, {}))
    with pytest.raises(RequestError, match=r"does not fit a prompt of 14 tokens|Both must be equal"):
        make_engine().scheduler.add_request(request)


def test_without_chunks_all_items_of_a_prompt_must_fit_into_one_step() -> None:
    engine = make_engine(enable_chunked_prefill=False, encoders={"can_chunk": False, "step_tokens": 8})
    with pytest.raises(RequestError, match=r"12 embeddings, which this engine needs in one step"):
        engine.scheduler.add_request(prompt_with(2, ("cat", 6), 1, ("dog", 6), 1))
    requests = [prompt_with(2, ("cat", 4), 1, ("dog", 4), 1), prompt_with(3, ("cow", 6), 3)]
    assert [result.token_ids for result in engine.run(*requests)] == list(map(expected, requests))


def test_pairs_and_text_only_engines_refuse_items() -> None:
    request = prompt_with(6, ("cat", 4), 3, companion=[1])
    with pytest.raises(RequestError, match="scale cannot be combined with images"):
        make_engine().scheduler.add_request(request)
    with pytest.raises(RequestError, match="text only"):
        make_scheduler().add_request(prompt_with(6, ("cat", 4), 3))


def test_a_failed_encoder_fails_its_request_and_is_tried_again_for_the_next_one() -> None:
    engine = make_engine(depth=2)
    bad, good = prompt_with(3, ("cat", 6), 2), prompt_with(3, ("dog", 6), 2)
    engine.runner.broken = {spans_of(bad)[0].content_hash}
    failed, result = engine.run(bad, good)
    assert failed.finish_reason is FinishReason.ERROR and result.token_ids == expected(good)
    engine.runner.broken.clear()
    again = prompt_with(3, ("cat", 6), 2)
    assert engine.run(again)[0].token_ids == expected(again)
    assert len(engine.runner.encoded) == 3


def test_a_failure_does_not_pass_from_request_to_request() -> None:
    engine = make_engine(depth=2, max_num_batched_tokens=8)
    first, second, third = (
        prompt_with(*parts, cache_salt=str(i))  # no block of one is another's
        for i, parts in enumerate([(1, ("cat", 6), 1), (4, ("cat", 6), 2), (2, ("cat", 6), 2)])
    )
    engine.runner.steps_without_memory.add(engine.scheduler.next_step)
    for request in (first, second, third):
        engine.add(request)
        engine.step()  # the second one reads a part of the result that the first one's step has lost
    engine.run()
    ends = [engine.results[each.request_id].finish_reason for each in (first, second)]
    assert ends == [FinishReason.ERROR] * 2
    assert engine.results[third.request_id].token_ids == expected(third)


def test_what_has_failed_is_forgotten_with_its_result() -> None:
    engine = make_engine(depth=2, max_num_batched_tokens=8)
    requests = [
        prompt_with(*parts, cache_salt=str(i)) for i, parts in enumerate([(1, ("cat", 6), 1), (4, ("cat", 6), 2)])
    ]
    engine.runner.steps_without_memory.add(engine.scheduler.next_step)
    for request in requests:
        engine.add(request)
        engine.step()  # the second one reads a part of the result that the first one's step has lost
    engine.run()
    other = prompt_with(9)
    assert engine.run(other)[0].token_ids == expected(other)
    engine.scheduler.check_integrity()


def test_a_prompt_that_ends_with_a_span_is_not_held_back_behind_it() -> None:
    engine = make_engine(long_prefill_token_threshold=5, max_num_batched_tokens=16, encoders={"both_ways": True})
    request = prompt_with(3, ("cat", 8))
    engine.add(request)
    assert engine.step().num_scheduled_tokens == [11]  # the threshold is in the span, which is never cut
    engine.run()
    assert engine.results[request.request_id].token_ids == expected(request)


def test_all_results_are_dropped_with_the_prefix_cache_and_when_weights_change() -> None:
    engine = make_engine(max_num_batched_tokens=6)
    request = prompt_with(2, ("cat", 9), 1)
    engine.add(request)
    engine.step()
    engine.scheduler.forget_computed(restart=False)  # in the middle of the item
    assert engine.run(prompt_with(4)) and engine.results[request.request_id].token_ids == expected(request)
    assert len(engine.runner.encoded) == 2
    assert engine.scheduler.reset_prefix_cache()
    engine.step()
    assert not engine.runner.cache


def test_results_are_kept_while_requests_with_cross_attention_run() -> None:
    engine = make_engine(encoders={"cross_attention": True, "cache_tokens": 20, "step_tokens": 10})
    requests = [make_request([1, 2], items=[make_item(name, 0, 0, 10)], max_tokens=6) for name in "abc"]
    results = engine.run(*requests)
    assert [result.token_ids for result in results] == list(map(expected, requests))
    assert len(engine.runner.encoded) == 3 and engine.runner.most_rows == 20
    same = make_request([1, 2, 3, 4, 5, 6], items=[make_item("c", 0, 0, 10)])
    other = make_request([1, 2, 3, 4, 5, 6], items=[make_item("d", 0, 0, 10)])
    for request, num_cached in ((same, 0), (same, 4), (other, 0)):
        request.request_id += "'"
        assert engine.run(request)[0].num_cached_tokens == num_cached


SEEDS = [*range(60), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(60, 1000))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_items_budgets_and_caches(seed: int) -> None:
    """The runner checks that what a step reads is encoded, and the scheduler that nothing in use is dropped."""
    dice = random.Random(seed)
    kind = dice.choice(["causal", "causal", "both_ways", "cross_attention"])
    longest = dice.randrange(2, 13)
    limits = {
        "step_tokens": dice.randrange(1, 20),
        "cache_tokens": dice.randrange(3 * longest if kind == "cross_attention" else longest, 40),
        **({kind: True} if kind != "causal" else {}),
    }
    engine = make_engine(
        depth=dice.randrange(1, 4),
        encoders=limits,
        num_blocks=dice.randrange(18, 40),
        block_size=dice.choice([1, 2, 4]),
        max_num_seqs=dice.randrange(1, 6),
        max_num_batched_tokens=dice.randrange(longest, 30),
        max_model_len=64,
        num_stages=dice.choice([1, 1, 2]),
        windows=dice.choice([(None,), (None,), (4,), (None, 6)]),
        long_prefill_token_threshold=dice.choice([None, None, 3]),
        **(_tiers(random.Random(-seed)) if seed % 2 else {}),
    )
    most_tokens = 24 if seed % 2 else 6  # so that requests are preempted
    added: dict[str, EngineCoreRequest] = {}
    aborted: set[str] = set()
    loses = False
    for _ in range(dice.randrange(5, 40)):
        action = dice.choice(["add", "add", "step", "step", "abort", "forget", "break", "lose"])
        if action == "add":
            request = _random_request(dice, f"r{len(added)}", kind, longest, most_tokens)
            added[request.request_id] = request
            engine.add(request)
        elif action == "abort" and added:
            name = dice.choice(list(added))
            if name in engine.scheduler.requests.by_id:
                aborted.add(name)
            engine.scheduler.abort_requests([name])
        elif action == "forget" and dice.random() < 0.3:
            while engine.in_flight:
                engine.collect()
            engine.scheduler.forget_computed(restart=dice.random() < 0.5)
        elif action == "break" and dice.random() < 0.3:
            engine.runner.broken.add(make_item(dice.choice("abcd"), 0, 1).span.content_hash)
        elif action == "lose" and dice.random() < 0.3:
            engine.runner.steps_without_memory.add(engine.scheduler.next_step)
            loses = True
        else:
            engine.step()
    engine.run()
    broken = engine.runner.broken
    for name, request in added.items():
        result = engine.results[name]
        may_fail = loses or any(item.span.content_hash in broken for item in request.items)
        if name in aborted or "room for" in (result.outputs[-1].error or ""):
            assert result.token_ids == expected(request)[: len(result.token_ids)]
        elif not (may_fail and result.finish_reason is FinishReason.ERROR):
            assert result.token_ids == expected(request), name
    assert engine.runner.most_rows <= limits["cache_tokens"]
    if kind != "cross_attention":  # which needs all items of a request at once
        assert engine.runner.most_encoded <= limits["step_tokens"]
    assert not engine.scheduler._encoders._used
    engine.runner.broken.clear()
    engine.runner.steps_without_memory.clear()
    for name, request in added.items():  # again: nothing is expected in the cache that is missing there
        request.request_id = f"{name}-again"
        [result] = engine.run(request)
        if "room for" not in (result.outputs[-1].error or ""):
            assert result.token_ids == expected(request), name


def _tiers(dice: random.Random) -> dict:
    """A host tier, and preemption by swapping."""
    tier = HostTier(dice.choice([1, 8, 40]), saves_evicted=dice.random() < 0.5)
    return {"host_tier": tier, "preemption_mode": dice.choice(["swap", "swap", "recompute"])}


def _random_request(dice: random.Random, name: str, kind: str, longest: int, most_tokens: int) -> EngineCoreRequest:
    fields = {"request_id": name, "max_tokens": dice.randrange(1, most_tokens)}
    if kind == "cross_attention":
        items = [make_item(dice.choice("abcd"), 0, 0, 1 + longest // 2) for _ in range(dice.randrange(3))]
        return make_request([dice.randrange(1, 3) for _ in range(dice.randrange(1, 12))], items=items, **fields)
    parts: list[int | tuple[str, int]] = []
    for _ in range(dice.randrange(1, 4)):
        parts.append(dice.randrange(0, 5))
        if dice.random() < 0.7:
            item = dice.randrange(4)
            parts.append(("abcd"[item], 1 + (7 * item) % longest))
    request = prompt_with(*parts, 1, **fields)
    for placed in request.items:
        length = placed.span.length
        if length % 3 == 0:  # two frames with a token between them
            placed.span.embedded, placed.num_encoded = [(0, 1), (2, length)], length - 1
    return request
