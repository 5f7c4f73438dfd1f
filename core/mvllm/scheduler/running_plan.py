"""Plans the running requests of a step, in service order, and gives the rest of a budget to long prompts.

Most running requests generate: they compute one token, for which they have a block. Others are planned in one of two
ways:

    a token that needs a block, or has draft tokens behind it       _plan_token
    several tokens, items that have not been passed, request pairs  _plan_sides

If blocks run out, the last running request is preempted. It has not been planned in this step yet.
"""

from __future__ import annotations

from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.messages.scheduler_output import PLACEHOLDER
from mvllm.scheduler.block_allocator import BlockAllocator
from mvllm.scheduler.encoder_planner import EncoderPlanner
from mvllm.scheduler.grammar_masks import DeferredMasks
from mvllm.scheduler.long_prefill_limiter import WHOLE, LongPrefillLimiter, PromptShare
from mvllm.scheduler.request import Request
from mvllm.scheduler.request_lists import RequestLists
from mvllm.scheduler.request_pairs import split_tokens
from mvllm.scheduler.state_planner import StatePlanner
from mvllm.scheduler.step import Step


class RunningPlan:
    """Plans running requests. Used by the step planner.

    Args:
        requests: The requests of the scheduler.
        kv_cache: Caches the blocks that the step fills.
        blocks: Allocates blocks.
        limiter: Gives long prompts their shares.
        states: Ends steps where the state of a request is kept.
        masks: Decides which requests are planned before their masks are known.
        encoders: Plans the encoders of images and audio; None if no request has items.
        num_stages: Pipeline stages. With more than one, a request waits for its token, and decoding requests are spread
            over as many steps.
        is_speculative: Requests have draft tokens, and blocks ahead.
        num_placeholders: Draft tokens planned for a request whose token is in flight, as PLACEHOLDER. With 0 requests
            with draft tokens wait for their token.
        max_step_tokens: Most tokens of a step.
    """

    def __init__(
        self,
        requests: RequestLists,
        kv_cache: KVCacheManager,
        *,
        blocks: BlockAllocator,
        limiter: LongPrefillLimiter,
        states: StatePlanner,
        masks: DeferredMasks,
        encoders: EncoderPlanner | None,
        num_stages: int,
        is_speculative: bool,
        num_placeholders: int,
        max_step_tokens: int,
    ) -> None:
        self._requests = requests
        self._kv_cache = kv_cache
        self._blocks = blocks
        self._limiter = limiter
        self._states = states
        self._masks = masks
        self._encoders = encoders
        self._num_stages = num_stages
        self._is_speculative = is_speculative
        self._num_placeholders = self._most_placeholders = num_placeholders
        self._max_step_tokens = max_step_tokens
        self._waits_for_tokens = num_stages > 1 or (is_speculative and not num_placeholders)

    def limit_placeholders(self, most: int) -> None:
        """Limits a request's placeholders in the next plan to the drafts that the last step asks for."""
        self._num_placeholders = min(most, self._most_placeholders)

    def plan(self, step: Step) -> None:
        """Plans every running request that has something to compute, until the budget or the blocks are used up."""
        running, batch, counts, budget = self._requests.running, step.batch, step.counts, step.budget
        waits_for_tokens, is_speculative = self._waits_for_tokens, self._is_speculative
        samples_left = -(-len(running) // self._num_stages)
        if self._requests.num_grammars:
            self._masks.start_plan()
        for request in running:  # preemption shortens the list at its end, behind `request`
            num_tokens = request.num_tokens
            if num_tokens >= request.max_num_tokens:
                continue  # its last token is in flight
            if waits_for_tokens and (request.has_token_in_flight or not samples_left):
                continue
            if not budget:
                break
            if request.grammar is not None and not self._reserve_mask(request, step):
                continue
            start = request.num_computed_tokens
            if start + 1 != num_tokens or start < request.plain_from:
                step.budget = budget
                samples = self._plan_prompt(request, step)
            elif is_speculative or num_tokens > request.table.num_slots:
                step.budget = budget
                samples = self._plan_token(request, step)
            else:
                batch.append(request)
                counts.append(1)
                budget -= 1
                samples_left -= 1
                continue
            if samples is None:
                break
            budget = step.budget
            samples_left -= samples
        step.budget = budget

    def plan_held_back(self, step: Step) -> None:
        """Gives the rest of the budget to the requests that were held back, in order and without preemption."""
        for request, positions in step.held_back:
            if not step.budget:
                break
            self._plan_sides(request, step.budget, positions, step, can_preempt=False)

    def _reserve_mask(self, request: Request, step: Step) -> bool:
        """Whether a request with a grammar can be planned. If not, its mask depends on a token in flight."""
        if not self._masks.can_schedule(request):
            return False
        self._masks.reserve(request, step.plan)
        return True

    def _plan_token(self, request: Request, step: Step) -> bool | None:
        """Plans the last known token of a request, which needs a block or may have draft tokens.

        Returns:
            Whether it samples. It waits if a draft token in flight may be its last token, or its state may be kept
            behind one. None if blocks are missing; then no further request is planned.
        """
        if request.num_drafts_in_flight and (
            request.max_num_tokens_in_flight >= request.max_num_tokens or self._states.may_reach_snapshot(request)
        ):
            return False
        drafts = request.draft_token_ids
        if self._is_speculative and (drafts or request.has_token_in_flight):
            num_rows = len(self._requests.running) + self._requests.num_pairs  # at least those that run
            num_others = num_rows - len(step.batch) - 1
            drafts = self._take_draft_tokens(request, step.budget - 1 - num_others)
        if not self._blocks.allocate(request, drafts, step.plan):
            return None
        self._kv_cache.cache_blocks(request.table, request.num_tokens)
        if drafts and request.grammar is not None:
            step.draft_masks[request.row] = masks = request.grammar.draft_masks(drafts)
            del drafts[len(masks) :]
        step.add(request, 1, drafts)
        if drafts:
            self._states.reserve_draft_slots(request, len(drafts))
        return True

    def _plan_prompt(self, request: Request, step: Step) -> bool | None:
        """Plans a request that computes several tokens, has not passed its items, or is one of a pair.

        Returns:
            Whether it samples. None if blocks are missing; then no further request is planned.
        """
        total = sum(side.num_tokens - side.num_computed_tokens for side in request.sides)
        share = self._take_share(request, total, step)
        positions = [-1] * len(request.sides)
        num_planned = self._plan_sides(request, min(share.num_tokens, step.budget), positions, step, can_preempt=True)
        if num_planned is None:
            return None
        if num_planned == total:
            return True
        if share.is_limited:
            step.held_back.append((request, positions))
        return False

    def _take_share(self, request: Request, total: int, step: Step) -> PromptShare:
        """Takes the share of this round of a request with `total` uncomputed tokens."""
        if total <= len(request.sides):
            return WHOLE
        share = self._limiter.share(total, is_very_long=request.is_very_long)
        self._limiter.take(share)
        return share

    def _plan_sides(
        self, request: Request, most: int, positions: list[int], step: Step, *, can_preempt: bool
    ) -> int | None:
        """Plans at most `most` tokens of all sides of a request.

        Args:
            positions: Where each side is in the batch; -1 for one that is not there. Gets the new positions.
            can_preempt: Other requests may be preempted. Otherwise a side in the batch has blocks for all that a step
                may compute: another call would free blocks that the first of its tokens attends to.

        Returns:
            How many tokens were planned; None if blocks are missing.
        """
        sides = request.sides
        starts = [
            side.num_computed_tokens + (step.counts[position] if position >= 0 else 0)
            for side, position in zip(sides, positions, strict=True)
        ]
        counts = self._count_tokens(request, starts, most, step.budget)
        missing = [0 if position >= 0 else count for count, position in zip(counts, positions, strict=True)]
        if not self._blocks.allocate_sides(request, missing, step.plan, can_preempt=can_preempt):
            return None
        for number, (side, start, count) in enumerate(zip(sides, starts, counts, strict=True)):
            if count:
                side.draft_token_ids = []
                self._kv_cache.cache_blocks(side.table, start + count)
                if start < side.items_end and self._encoders is not None:
                    self._encoders.reserve(side, start, start + count, step.plan)
                positions[number] = step.add(side, count, position=positions[number])
        return sum(counts)

    def _count_tokens(self, request: Request, starts: list[int], most: int, budget: int) -> list[int]:
        """How many tokens each side of a request computes from its start on: at most `most`, but whole items."""
        sides = request.sides
        left = [side.num_tokens - start for side, start in zip(sides, starts, strict=True)]
        rooms = [self._states.room(side, start) for side, start in zip(sides, starts, strict=True)]
        counts = split_tokens(left, most, rooms)
        if starts[0] < request.items_end and self._encoders is not None and counts[0]:
            counts[0] = self._encoders.limit(request, starts[0], counts[0], budget)
        return counts

    def _take_draft_tokens(self, request: Request, budget: int) -> list[int]:
        """Removes a running request's draft tokens, and returns as many as the budget allows.

        With a token in flight these are placeholders. All that a step may compute of a request, from its lower bound
        on, is no more than the largest step: so many slots there are behind the window of a group of layers.
        """
        drafts, request.draft_token_ids = request.draft_token_ids, []
        if request.has_token_in_flight:
            drafts = [PLACEHOLDER] * (self._num_placeholders if request.takes_drafts else 0)
            budget = min(budget, self._max_step_tokens - 1 - request.num_drafts_in_flight)
        if self._states.is_needed:
            budget = min(budget, self._states.draft_budget(request, others_wait=bool(self._requests.waiting)))
        # The step also samples a token behind the last draft token; that may be the request's last one.
        return drafts[: max(0, min(budget, request.max_num_tokens - request.max_num_tokens_in_flight - 1))]
