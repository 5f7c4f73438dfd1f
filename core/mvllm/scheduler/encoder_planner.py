"""Plans encoder runs for the images, audio and embeddings of prompts, and ends chunks where a result is missing.

    tokens        a b c [ item 1 ] d e [ item 2 ] f g
    chunk         |----------------------|                 item 1 is encoded in this step or was before; for item 2 the
                                                           step's budget of rows, or the cache, has no room
    next chunk                           |----------|

A request uses the result of an item from the step that reads its first row to the step that reads its last one; models
with cross-attention read it in every step. A result that is used is not dropped. At most one item of a request is read
in part, so a request that runs can always go on: the cache holds the largest item, and the other items in it belong to
requests that can go on, too.

A failed request may have failed because of an encoder. What it read is dropped, or encoded again for the next reader if
other requests use it, so that one failure does not pass from request to request.

Plans are executed in order. So a result that a step reads may be dropped by the next plan, also while that step is in
flight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

from mvllm.config.encoder_limits import items_of, limits_of
from mvllm.config.engine_config import EngineConfig
from mvllm.config.multimodal import EncoderLimits, MultiModalModel
from mvllm.errors import RequestError
from mvllm.messages.multimodal import EncoderInput, ItemSpan, MultiModalItem
from mvllm.messages.requests import ENCODER_SECONDS_BUCKETS, EngineCoreRequest, SchedulerStats
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.scheduler.encoder_cache import EncoderCache
from mvllm.scheduler.request import Request


class EncoderPlanner:
    """Owner of the encoder cache's contents. Used by the scheduler.

    Args:
        model: What the model takes beside text.
        limits: Rows per step and in the cache.
        max_num_batched_tokens: Most tokens of a step.
        can_chunk: Prompts can be computed over several steps.
        max_model_len: Longest sequence, and upper bound of rotary positions.

    Attributes:
        keeps_spans_whole: No step may cut a run of embeddings: an image, or a frame of a video.
        has_cross_attention: Requests read their items in every step.
        cache: What the workers hold.
    """

    def __init__(
        self,
        model: MultiModalModel,
        limits: EncoderLimits,
        *,
        max_num_batched_tokens: int,
        max_model_len: int,
        can_chunk: bool = True,
    ) -> None:
        self._limits = limits
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._can_chunk = can_chunk
        self.keeps_spans_whole = model.spans_attend_both_ways
        self.has_cross_attention = model.cross_attention
        self.cache = EncoderCache(limits.cache_tokens)
        self._num_queries = self._num_hits = 0
        self._num_steps = [0] * (len(ENCODER_SECONDS_BUCKETS) + 1)
        self._seconds = 0.0
        self._num_left = limits.step_tokens  # rows that the step may still encode
        self._used: dict[Request, dict[int, bytes]] = {}  # by request, and by the item's number in it
        self._suspect: set[bytes] = set()  # results that a failed request has read
        self._passed: list[bytes] = []  # read to their end by the plan being made

    # ------------------------------------------------------------------------------------------------------ requests

    def check(self, request: EngineCoreRequest) -> None:
        """Checks that a request with items can run.

        Raises:
            RequestError: It cannot, or the spans do not fit the prompt.
        """
        if (pair := request.pair) is not None:
            raise _error(
                f"{pair.parameter} cannot be combined with images, audio or embeddings in the prompt. Omit one."
            )
        stop, num_tokens = 0, len(request.prompt_token_ids)
        for item in request.items:
            self._check_item(item, stop, num_tokens)
            stop = max(stop, item.span.stop)
        end = num_tokens + num_skipped_positions(request)  # rotary positions never fall, so no other one is larger
        if end > num_tokens and end >= self._max_model_len:
            raise _error(
                f"The positions of the prompt with its items end at {end}, but max_model_len is {self._max_model_len}. "
                "Use shorter videos."
            )
        rows = {item.span.content_hash: item.num_encoded for item in request.items}
        if len(rows) > 1 and (self.has_cross_attention or not self._can_chunk):
            self._check_together(sum(rows.values()))

    def _check_item(self, item: MultiModalItem, start: int, prompt_len: int) -> None:
        span, ends = item.span, 0
        has_place = span.offset == span.length == 0 if self.has_cross_attention else span.length > 0
        for first, end in span.embedded:
            if not ends <= first < end <= span.length:
                has_place = False
            ends = end
        if not (has_place and start <= span.offset and span.stop <= prompt_len and len(span.content_hash) == 32):
            raise _error(
                f"An item of modality {item.modality!r} has the span {span.offset} to {span.stop} with embeddings at "
                f"{span.embedded}, which does not fit a prompt of {prompt_len} tokens whose earlier items end at "
                f"{start}. Spans follow each other, and their embeddings are inside of them."
            )
        if not self.has_cross_attention and span.num_embeddings != item.num_encoded:
            raise _error(
                f"An item of modality {item.modality!r} has {item.num_encoded} embeddings, but its span takes "
                f"{span.num_embeddings}. Both must be equal."
            )
        if item.num_encoded > self._limits.cache_tokens:
            raise _error(
                f"An item of modality {item.modality!r} has {item.num_encoded} embeddings, but the encoder cache has "
                f"room for {self._limits.cache_tokens}. Make it smaller, or start the engine with a larger "
                "max_num_batched_tokens or encoder_cache_size."
            )
        longest = self._longest_run(item)
        if longest > self._max_num_batched_tokens:
            raise _error(
                f"An item of modality {item.modality!r} has {longest} tokens in a row, which attend to each other in "
                f"both directions and so must be in one step, but max_num_batched_tokens is "
                f"{self._max_num_batched_tokens}. Start the engine with a larger max_num_batched_tokens."
            )

    def _check_together(self, num_rows: int) -> None:
        most = self._limits.cache_tokens
        if not self.has_cross_attention:
            most = min(most, self._limits.step_tokens)
        if num_rows > most:
            raise _error(
                f"The items of the prompt have {num_rows} embeddings, which this engine needs in one step; it takes "
                f"{most}. Send fewer items, or start the engine with a larger max_num_batched_tokens, "
                "max_num_encoder_input_tokens or encoder_cache_size."
            )

    def release(self, request: Request) -> None:
        """A request stops to run, or has ended: it uses no results any more. Requests without items are ignored."""
        for content_hash in self._used.pop(request, {}).values():
            self.cache.release(content_hash)

    def discard(self, request: Request) -> None:
        """A request has failed: drops its results, since its encoder may be what failed.

        Those that others use stay, and are encoded again for whoever reads them next.
        """
        self.release(request)
        self._distrust(item.span.content_hash for item in request.items)

    def discard_inputs(self, plan: SchedulerOutput) -> None:
        """A row of a plan has failed, and maybe the whole step: drops what it should have encoded, as `discard`."""
        self._distrust(item.content_hash for item in plan.encoder_inputs)

    def end_step(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """The results of a plan are back: counts the time of its encoder runs, and drops what may be wrong."""
        if output.encoder_seconds:
            self.add_encoder_time(output.encoder_seconds)
        if output.errors:
            self.discard_inputs(plan)

    def _distrust(self, hashes: Iterable[bytes]) -> None:
        for content_hash in hashes:
            if self.cache.is_unused(content_hash):
                self.cache.drop(content_hash)
            elif content_hash in self.cache:
                self._suspect.add(content_hash)

    def drop_unused(self) -> bool:
        """Drops all results that no running request uses. Returns whether none is left."""
        return self.cache.drop_unused()

    def clear(self) -> None:
        """Drops all results. Running requests have those that they still read encoded again.

        In models with cross-attention no request may be running.
        """
        assert not (self.has_cross_attention and self._used), "running requests read results in every step"
        self._used.clear()
        self._suspect.clear()
        self.cache.clear()

    # --------------------------------------------------------------------------------------------------------- plans

    def start_plan(self) -> None:
        """Begins a plan."""
        self._num_left = self._limits.step_tokens

    def end_plan(self) -> None:
        """Ends a plan. What it reads to the end is not used any more."""
        for content_hash in self._passed:
            self.cache.release(content_hash)
        self._passed.clear()

    def limit(self, request: Request, start: int, num_tokens: int, budget: int) -> int:
        """How many tokens a request may compute in the plan being made. No side effects.

        Args:
            start: Its first position.
            num_tokens: Most tokens, at least one. Exceeded where a span must be whole and fits into `budget`.
            budget: Most tokens of the whole step that are left.

        Returns:
            0 if the first token is in a span for whose item there is no room yet.
        """
        if self.has_cross_attention:
            return num_tokens if self._fit({item.span.content_hash: item for item in request.items}) else 0
        end, needed = start + num_tokens, dict[bytes, MultiModalItem]()
        for item in request.items:
            span = item.span
            if span.stop <= start:
                continue
            if span.offset >= end:
                break
            first, stop = self._run_around(item, end)
            if stop - start > budget:
                end = first
                if end <= max(start, span.offset):
                    return max(0, span.offset - start)
            else:
                end = stop
            needed[span.content_hash] = item
            if not self._fit(needed):
                return max(0, span.offset - start)
        return end - start

    def _longest_run(self, item: MultiModalItem) -> int:
        """Tokens of the longest run that no step may cut."""
        is_whole = self.keeps_spans_whole and not item.is_causal
        return max((stop - first for first, stop in item.span.embedded), default=0) if is_whole else 0

    def _run_around(self, item: MultiModalItem, end: int) -> tuple[int, int]:
        """Bounds of the run of embeddings that a step up to `end` would cut; both are `end` if there is none."""
        if self.keeps_spans_whole and not item.is_causal:
            offset = item.span.offset
            for first, stop in item.span.embedded:
                if offset + first < end < offset + stop:
                    return offset + first, offset + stop
        return end, end

    def _fit(self, needed: Mapping[bytes, MultiModalItem]) -> bool:
        """Whether the cache and the step have room for these items. What exceeds the step's limit is encoded alone."""
        num_taken = num_encoded = num_items = 0
        for content_hash, item in needed.items():
            is_there = content_hash in self.cache
            if not is_there or content_hash in self._suspect:
                num_encoded += item.num_encoded
                num_items += 1
            if not is_there or self.cache.is_unused(content_hash):
                num_taken += item.num_encoded
        is_alone = self._num_left == self._limits.step_tokens and (num_items == 1 or self.has_cross_attention)
        return num_taken <= self.cache.num_available and (num_encoded <= self._num_left or is_alone or not num_encoded)

    def reserve(self, request: Request, start: int, end: int, plan: SchedulerOutput) -> None:
        """Plans the encoder runs that the positions `start` to `end - 1` need, which `limit` has allowed."""
        used = self._used.setdefault(request, {})
        missing: list[tuple[int, MultiModalItem]] = []
        for number, item in self._items_between(request, start, end):
            content_hash = item.span.content_hash
            if number not in used:
                self._num_queries += 1
                if content_hash not in self.cache:
                    missing.append((number, item))
                    continue
                self._num_hits += content_hash not in self._suspect
                self.cache.acquire(content_hash)
                used[number] = content_hash
            if content_hash in self._suspect:
                self._encode(item, plan)
        for number, item in missing:  # behind the others: it may drop what is unused
            content_hash = used[number] = item.span.content_hash
            if content_hash in self.cache:
                self._num_hits += 1
                self.cache.acquire(content_hash)
                continue
            self.cache.add(content_hash, item.num_encoded)
            self._encode(item, plan)
        if not self.has_cross_attention:
            for number in [number for number in used if request.items[number].span.stop <= end]:
                self._passed.append(used.pop(number))

    def _encode(self, item: MultiModalItem, plan: SchedulerOutput) -> None:
        content_hash = item.span.content_hash
        self._suspect.discard(content_hash)
        self._num_left -= item.num_encoded
        plan.encoder_inputs.append(EncoderInput(content_hash, item.modality, item.num_encoded, item.features))

    def pop_freed(self) -> list[bytes]:
        """See `EncoderCache.pop_freed`."""
        freed = self.cache.pop_freed()
        self._suspect.difference_update(freed)
        return freed

    def _items_between(self, request: Request, start: int, end: int) -> list[tuple[int, MultiModalItem]]:
        return [
            (number, item)
            for number, item in enumerate(request.items)
            if self.has_cross_attention or (item.span.offset < end and item.span.stop > start)
        ]

    # --------------------------------------------------------------------------------------------------------- stats

    def add_encoder_time(self, seconds: float) -> None:
        """Counts a step that ran encoders."""
        self._num_steps[bisect_left(ENCODER_SECONDS_BUCKETS, seconds)] += 1
        self._seconds += seconds

    def add_stats(self, stats: SchedulerStats) -> None:
        """Adds the counters and gauges of encoders."""
        stats.encoder_cache_queries, stats.encoder_cache_hits = self._num_queries, self._num_hits
        stats.encoder_cache_rows = self.cache.num_held
        stats.encoder_steps, stats.encoder_seconds = self._num_steps.copy(), self._seconds

    def check_integrity(self) -> None:
        """Raises AssertionError unless the users of results are those known here, and suspects are results."""
        users = Counter(each for used in self._used.values() for each in used.values())
        assert not self._passed, "between two plans"
        self.cache.check_integrity(users, self._suspect)


def check_items(encoders: EncoderPlanner | None, request: EngineCoreRequest) -> None:
    """Checks a request with items, see `EncoderPlanner.check`; without a planner there must be none."""
    if encoders is None:
        raise _error("This engine takes text only.")
    encoders.check(request)


def num_skipped_positions(request: EngineCoreRequest) -> int:
    """How much further the rotary positions of a request get than its sequence positions. Both have the same bound."""
    return max(0, sum(_rope_shift(item.span) for item in request.items)) if request.items else 0


def _rope_shift(span: ItemSpan) -> int:
    """How much further rotary positions advance over a span than sequence positions; negative in most models."""
    return 0 if span.rope_length is None else span.rope_length - span.length


def _error(message: str) -> RequestError:
    return RequestError(message, parameter="multi_modal_data")


def make_encoder_planner(config: EngineConfig) -> EncoderPlanner | None:
    """The planner; None if requests take text only."""
    model, limits = items_of(config), limits_of(config)
    if model is None or limits is None:
        return None
    return EncoderPlanner(
        model,
        limits,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
        can_chunk=config.scheduler.enable_chunked_prefill,
    )
