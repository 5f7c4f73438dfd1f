"""Request pairs: two requests that are scheduled and sampled together.

    primary       | prompt ........................... | generated |
    companion     | its own prompt .... | the same generated tokens |

Each side is a Request with a row and a block table of its own. The primary is in the scheduler's lists, and its
companion in none: every transition of the primary (`RequestLists`) moves both. Each side finds its own prefix in the
cache and computes its prompt in chunks, but neither computes its last token before the other one can. So both sample
in the same step, in which the worker combines their logits and gives both the same token. The planner treats every
request as a list of sides: one, or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from mvllm.config.engine_config import SchedulerConfig
from mvllm.errors import RequestError
from mvllm.kv_cache.block_table import BlockTable
from mvllm.messages.requests import EngineCoreRequest
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams
from mvllm.scheduler.request import PAIRED, Request, RequestStatus


def companion_data(data: EngineCoreRequest) -> EngineCoreRequest:
    """The companion of a request with a `pair`, as a request of its own.

    Its sampling parameters have no stop condition and no output: it follows its primary.
    """
    assert data.pair is not None
    params = data.sampling_params
    return msgspec.structs.replace(
        data,
        request_id=f"{data.request_id} (companion)",
        prompt_token_ids=data.pair.prompt_token_ids,
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
        position_key=data.pair.position_key,
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


def check_pair(data: EngineCoreRequest, config: SchedulerConfig, max_model_len: int) -> None:
    """Checks that both sides of a pair can run together.

    Raises:
        RequestError: The limits of the engine do not allow it.
    """
    pair = data.pair
    assert pair is not None
    prompts = data.prompt_token_ids, pair.prompt_token_ids
    if not 0 < len(prompts[1]) < max_model_len:
        raise RequestError(
            f"{pair.prompt_parameter} has {len(prompts[1])} tokens; it must have at least 1 and at most "
            f"{max_model_len - 1} with max_model_len={max_model_len}.",
            parameter=pair.prompt_parameter,
        )
    if config.max_num_seqs < 2 or config.max_num_batched_tokens < 2:
        raise RequestError(
            f"{pair.parameter} needs two rows in a step, but the engine has max_num_seqs={config.max_num_seqs} and "
            f"max_num_batched_tokens={config.max_num_batched_tokens}. Start it with at least 2 of both.",
            parameter=pair.parameter,
        )
    if not config.enable_chunked_prefill:
        room = max_model_len - max(map(len, prompts))
        wanted = data.sampling_params.max_tokens
        longest = sum(map(len, prompts)) + 2 * (room if wanted is None else min(room, wanted))
        if longest > config.max_num_batched_tokens:
            raise RequestError(
                f"Without chunked prefill a step must hold both prompts of a request with {pair.parameter} and their "
                f"outputs, {longest} tokens, but max_num_batched_tokens is {config.max_num_batched_tokens}. Shorten "
                "the prompts or max_tokens, or start the engine with a larger limit.",
                parameter=pair.parameter,
            )


def split_tokens(left: Sequence[int], most: int, rooms: Sequence[int]) -> list[int]:
    """How many of its uncomputed tokens each side of a request computes in a step; all may be 0.

    Args:
        left: Uncomputed tokens of each side, at least one each.
        most: Most tokens of all sides together.
        rooms: Most tokens of each side.
    """
    if len(left) == 1:
        return [min(left[0], most, rooms[0])]
    if sum(left) <= most and all(num <= room for num, room in zip(left, rooms, strict=True)):
        return list(left)
    counts = []
    for num, room in zip(left, rooms, strict=True):
        counts.append(min(num - 1, room, most))
        most -= counts[-1]
    return counts


def pairs_sampled_apart(batch: list[Request], tokens: list[int]) -> Iterator[Request]:
    """The request pairs whose sides have different tokens, because the worker does not know of pairs.

    Args:
        batch: The rows of a step.
        tokens: The token of each.
    """
    token_of = {
        request.companion: token
        for request, token in zip(batch, tokens, strict=True)
        if request.companion is not None and request.status is not RequestStatus.FINISHED
    }
    for request, token in zip(batch, tokens, strict=True):
        if token_of.get(request, token) != token:
            yield request.listed


def num_companion_tokens(batch: list[Request], tokens: list[int]) -> int:
    """How many of the tokens of a step, -1 for none, are those of companions, which repeat their primaries' tokens."""
    return sum(
        token >= 0 and request.primary is not None and request.status is not RequestStatus.FINISHED
        for token, request in zip(tokens, batch, strict=True)
    )
