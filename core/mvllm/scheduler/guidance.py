"""Guided requests: a request and its unconditional companion, which run as a pair (see `request_pairs.py`)."""

from __future__ import annotations

import msgspec

from mvllm.config.engine_config import SchedulerConfig
from mvllm.errors import RequestError
from mvllm.kv_cache.block_table import BlockTable
from mvllm.messages.requests import EngineCoreRequest
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams
from mvllm.scheduler.request import PAIRED, Request


def companion_data(data: EngineCoreRequest) -> EngineCoreRequest:
    """The companion of a request whose `unconditional_prompt_token_ids` are set, as a request of its own.

    Its sampling parameters have no stop condition and no output: it follows its primary.
    """
    assert data.unconditional_prompt_token_ids is not None
    params = data.sampling_params
    return msgspec.structs.replace(
        data,
        request_id=f"{data.request_id} (unconditional)",
        prompt_token_ids=data.unconditional_prompt_token_ids,
        sampling_params=SamplingParams(
            temperature=0.0,
            max_tokens=None,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=params.skip_reading_prefix_cache,
            token_space=params.token_space,
        ),
        eos_token_ids=[],
        position_key=data.unconditional_position_key,
        unconditional_prompt_token_ids=None,
    )


def add_companion(request: Request, data: EngineCoreRequest, table: BlockTable, max_model_len: int) -> None:
    """Gives a request its companion.

    Args:
        data: From `companion_data`.
        table: The companion's block table.
    """
    companion = Request(data, table, request.order, max_model_len)
    most = min(request.max_num_tokens - request.num_prompt_tokens, max_model_len - companion.num_prompt_tokens)
    request.max_num_tokens = request.num_prompt_tokens + most
    companion.max_num_tokens = companion.num_prompt_tokens + most + 1  # it never ends by itself
    companion.primary, request.companion = request, companion
    request.plain_from = PAIRED


def check_guided(data: EngineCoreRequest, config: SchedulerConfig, max_model_len: int) -> None:
    """Checks that both sides of a guided request can run together.

    Raises:
        RequestError: The limits of the engine do not allow it.
    """
    prompts = data.prompt_token_ids, data.unconditional_prompt_token_ids or []
    if not 0 < len(prompts[1]) < max_model_len:
        raise RequestError(
            f"The unconditional prompt has {len(prompts[1])} tokens; it must have at least 1 and at most "
            f"{max_model_len - 1} with max_model_len={max_model_len}.",
            parameter="negative_prompt",
        )
    if config.max_num_seqs < 2 or config.max_num_batched_tokens < 2:
        raise RequestError(
            f"guidance_scale needs two rows in a step, but the engine has max_num_seqs={config.max_num_seqs} and "
            f"max_num_batched_tokens={config.max_num_batched_tokens}. Start it with at least 2 of both.",
            parameter="guidance_scale",
        )
    if not config.enable_chunked_prefill:
        room = max_model_len - max(map(len, prompts))
        wanted = data.sampling_params.max_tokens
        longest = sum(map(len, prompts)) + 2 * (room if wanted is None else min(room, wanted))
        if longest > config.max_num_batched_tokens:
            raise RequestError(
                f"Without chunked prefill a step must hold both prompts of a guided request and their outputs, "
                f"{longest} tokens, but max_num_batched_tokens is {config.max_num_batched_tokens}. Shorten the prompts "
                "or max_tokens, or start the engine with a larger limit.",
                parameter="guidance_scale",
            )
