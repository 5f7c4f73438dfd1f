"""A fake runner that encodes: what a position holds depends on the item there, and the item must have been encoded."""

from __future__ import annotations

import hashlib

from mvllm.messages.multimodal import ArrayData, ItemSpan, MultiModalItem
from mvllm.messages.requests import EngineCoreRequest
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tests.unit.scheduler.fake_runner import FakeRunner, fingerprints

PLACEHOLDER = 99


def make_item(name: str, offset: int, length: int, num_encoded: int | None = None) -> MultiModalItem:
    """An item whose positions all take a row. With length 0 one of a model with cross-attention."""
    span = ItemSpan(hashlib.sha256(name.encode()).digest(), offset, length, [(0, length)] if length else [])
    features = {"name": ArrayData("uint8", [len(name)], name.encode())}
    return MultiModalItem("image", span, length if num_encoded is None else num_encoded, features)


def shown_ids(token_ids: list[int], spans: list[ItemSpan]) -> list[int]:
    """Token ids in which the positions of items are replaced by numbers of their contents and places."""
    ids = list(token_ids)
    for span in spans:
        first = 1000 + int.from_bytes(span.content_hash[:3])
        if not span.length:
            ids[0] += first
        for start, stop in span.embedded:
            for place in range(start, stop):
                ids[span.offset + place] = first + place
    return ids


def spans_of(request: EngineCoreRequest) -> list[ItemSpan]:
    return [item.span for item in request.items]


class ItemRunner(FakeRunner):
    """Keeps what plans encode, and checks that each item which a row reads is there.

    Attributes:
        cache: Rows of each result, by content hash.
        most_rows, most_encoded: The largest total so far of the cache, and of a step's encoder runs with several items.
        encoded: Every encoder run, in order.
        keeps_spans_whole: Steps must not cut spans.
        reads_always: Every step of a row reads its items.
        broken: Content hashes whose encoder fails.
        lost: Content hashes that a step without memory should have encoded.
        suspect: Content hashes that a failed row has read, or a failed step should have encoded.
    """

    def __init__(self, **limits) -> None:
        super().__init__(**limits)
        self.cache: dict[bytes, int] = {}
        self.encoded: list[bytes] = []
        self.most_rows = self.most_encoded = 0
        self.keeps_spans_whole = self.reads_always = False
        self.broken: set[bytes] = set()
        self.lost: set[bytes] = set()
        self.suspect: set[bytes] = set()
        self._item_errors: dict[int, str] = {}

    def _apply(self, plan: SchedulerOutput) -> None:
        super()._apply(plan)
        for data in plan.new_requests:
            row = self.rows[data.row]
            row.prints = fingerprints(shown_ids(row.tokens, data.items))
        for content_hash in plan.freed_encoder_outputs:
            self.cache.pop(content_hash, None)
            self.lost.discard(content_hash)
        for item in plan.encoder_inputs:
            is_there = item.content_hash in self.cache and item.content_hash not in self.suspect
            assert not is_there, "encoded although it is there"
            if plan.step in self.steps_without_memory:
                self.lost.add(item.content_hash)
                continue
            self.lost.discard(item.content_hash)
            self.encoded.append(item.content_hash)
            self.cache[item.content_hash] = item.num_encoded
        self.most_rows = max(self.most_rows, sum(self.cache.values()))
        if len(plan.encoder_inputs) > 1:
            self.most_encoded = max(self.most_encoded, sum(item.num_encoded for item in plan.encoder_inputs))
        self._item_errors = {}
        for position, (row, count) in enumerate(zip(plan.rows, plan.num_scheduled_tokens, strict=True)):
            self._check_items(position, row, count)

    def _check_items(self, position: int, row: int, count: int) -> None:
        state = self.rows[row]
        start, end = state.num_computed, state.num_computed + count
        for span in state.data.items:
            if not (self.reads_always or (span.offset < end and span.stop > start)):
                continue
            is_there = span.content_hash in self.cache
            assert is_there or span.content_hash in self.lost, f"{state.data.request_id} reads what is not encoded"
            if not is_there:
                self._item_errors[position] = "the embeddings are missing"
            if span.content_hash in self.broken:
                self._item_errors[position] = "cannot be encoded"
            if self.keeps_spans_whole:
                is_cut = any(first < end - span.offset < stop for first, stop in span.embedded)
                assert not is_cut, f"{state.data.request_id} is cut in its span at {span.offset}"

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(plan)
        for position, error in self._item_errors.items():
            output.errors[position] = error
        if output.errors:
            self.suspect.update(item.content_hash for item in plan.encoder_inputs)
            for position in output.errors:
                self.suspect.update(span.content_hash for span in self.rows[plan.rows[position]].data.items)
        return output
