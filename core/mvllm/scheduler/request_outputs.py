"""Messages about requests: NewRequestData for workers, EngineCoreOutput for front ends."""

from __future__ import annotations

import msgspec

from mvllm.messages.multimodal import ItemSpan, MultiModalItem
from mvllm.messages.requests import EngineCoreOutput, FinishReason, PositionLogprobs, SchedulerStats
from mvllm.messages.scheduler_output import PLACEHOLDER, ModelRunnerOutput, NewRequestData, SchedulerOutput
from mvllm.scheduler.request import Request, RequestStatus


def new_request_data(request: Request, num_computed_tokens: int) -> NewRequestData:
    """The data of a request that starts to run, which has its row and its blocks.

    Args:
        num_computed_tokens: Leading tokens found in the prefix cache.
    """
    data, table = request.data, request.table
    return NewRequestData(
        request_id=request.request_id,
        row=request.row,
        token_ids=request.token_ids.copy(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=table.block_ids.copy(),
        sampling_params=data.sampling_params,
        eos_token_ids=data.eos_token_ids,
        pooling_params=data.pooling_params,
        more_block_ids=[blocks.block_ids.copy() for blocks in table.groups[1:]],
        lora_request=data.lora_request,
        guided_row=None if request.primary is None else request.primary.row,
        items=[_span_of(item) for item in request.items] if request.items else [],
        combiner="" if data.pair is None or request.primary is None else data.pair.combiner,
        combiner_settings=b"" if data.pair is None or request.primary is None else data.pair.settings,
    )


def _span_of(item: MultiModalItem) -> ItemSpan:
    return msgspec.structs.replace(item.span, is_causal=True) if item.is_causal else item.span


def cache_too_small_message(num_tokens: int, num_needed: int, block_size: int, num_blocks: int) -> str:
    """Error of a request that does not fit into the whole KV cache."""
    return (
        f"The request needs room for {num_tokens} tokens in the KV cache, {num_needed} blocks of {block_size}; the "
        f"cache has {num_blocks}. Request fewer tokens, or start the engine with more memory for the KV cache or a "
        "smaller max_model_len."
    )


def collect_logprobs(batch: list[Request], starts: dict[int, int], output: ModelRunnerOutput) -> None:
    """Stores log-probabilities in their requests until the next outputs."""
    for position, entry in output.logprobs.items():
        request = batch[position]
        if request.logprobs is not None and request.status is not RequestStatus.FINISHED:
            request.logprobs.append(entry)
            request.logprobs += output.further_logprobs.get(position, ())
            if position in output.conditional_logprobs:
                request.conditional_logprobs.append(output.conditional_logprobs[position])
    for position, entries in output.prompt_logprobs.items():
        request = batch[position]
        if position in starts and request.status is not RequestStatus.FINISHED:  # a finished request may have a gap
            request.add_prompt_logprobs(starts[position], entries)


def count_draft_tokens(stats: SchedulerStats, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """Adds a plan's draft tokens, and the numbers verified and accepted at each position, to the counters."""
    for position, drafts in plan.draft_token_ids.items():
        verified = len(drafts) if drafts[0] != PLACEHOLDER else output.num_draft_tokens.get(position, 0)
        stats.num_drafts += verified > 0
        stats.num_draft_tokens += verified
        for place in range(verified):
            stats.drafted_at[place] += 1
    for accepted in output.further_token_ids.values():
        for place in range(len(accepted)):
            stats.accepted_at[place] += 1


def make_output(
    request: Request,
    token_ids: list[int],
    finish_reason: FinishReason | None = None,
    stop_reason: int | None = None,
    error: str | None = None,
) -> EngineCoreOutput:
    """An output with new tokens and all stored log-probabilities."""
    logprobs: list[PositionLogprobs] | None = None
    if request.logprobs is not None:
        logprobs, request.logprobs = request.logprobs, []
    conditional_logprobs: list[float] | None = None
    if request.conditional_logprobs:
        conditional_logprobs, request.conditional_logprobs = request.conditional_logprobs, []
    prompt_logprobs = request.prompt_logprobs if request.has_all_prompt_logprobs else None
    request.prompt_logprobs = None
    relaxations, request.relaxations = request.relaxations, ()
    request.has_only_tokens = request.emits_each_step and request.logprobs is None
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=token_ids,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=max(request.num_cached_tokens, 0),
        error=error,
        scheduled_time=request.scheduled_time,
        first_token_time=request.first_token_time,
        conditional_logprobs=conditional_logprobs,
        relaxations=relaxations,
    )


def final_output(
    request: Request,
    finish_reason: FinishReason,
    stop_reason: int | None = None,
    error: str | None = None,
    num_new_tokens: int = 1,
) -> EngineCoreOutput:
    """The last output of a request: its newest tokens, or all generated tokens if none were sent before."""
    if request.pooling_type is not None and finish_reason is FinishReason.LENGTH:  # the worker sampled a token
        message = "The platform's worker does not support pooling: it sampled a token."
        return make_output(request, [], FinishReason.ERROR, error=message)
    if request.data.sampling_params.max_tokens == 0 and error is None:
        new_token_ids, finish_reason, stop_reason = [], FinishReason.LENGTH, None
        request.logprobs = None if request.logprobs is None else []
        request.conditional_logprobs = []
    elif not request.emits_each_step:
        new_token_ids = request.token_ids[request.num_prompt_tokens :]
    elif error is None:
        new_token_ids = request.token_ids[len(request.token_ids) - num_new_tokens :]
    else:
        new_token_ids = []
    output = make_output(request, new_token_ids, finish_reason, stop_reason, error)
    if request.weight_versions and not request.emits_each_step:
        output.weight_versions = request.weight_versions
    return output
