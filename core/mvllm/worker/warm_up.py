"""Runs of the model without requests: the profile run, which measures memory, and the warm-up, which compiles.

Such a run reads block 0 of the KV cache, and states of zeros. It writes nothing but scratch memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from mvllm.logging import get_logger
from mvllm.messages.sampling_params import SamplingParams
from mvllm.platform.shapes import ShapePolicy, StepKind
from mvllm.platform.tokens_on_device import keeps_sampled_tokens_on_device
from mvllm.sampling.batch_plan import kernel_warm_up_params, warm_up_params
from mvllm.sampling.penalties import DeviceTokenCounts
from mvllm.sampling.sampler import Sampler
from mvllm.sampling.sampling_state import SamplingState
from mvllm.sampling.token_history import TokenHistory
from mvllm.worker.capture_shapes import reachable_shapes, warm_up_shapes
from mvllm.worker.model_forward import ModelForward
from mvllm.worker.sampled_token_buffer import SampledTokenBuffer
from mvllm.worker.state_passes import pass_inputs, write_padding
from mvllm.worker.step_buffer import BufferLayout
from mvllm.worker.step_inputs import StepInputs

logger = get_logger(__name__)


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step after padding, and the largest step that has them.

    Attributes:
        tokens, requests, pages: Padded sizes.
        num_tokens, num_requests: Tokens and requests of the step before padding.
        kind: Kind of the step.
        captured_query_len: `max_query_len` of a captured step; None for other steps.
    """

    tokens: int
    requests: int
    pages: int
    num_tokens: int
    num_requests: int
    kind: StepKind = StepKind.MIXED
    captured_query_len: int | None = None


def profile_step(
    forward: ModelForward, make_sampler: Callable[[], Sampler], *, divisor: int, block_size: int, num_draft_tokens: int
) -> None:
    """Runs the largest step that the limits allow, divided by `divisor`, and samples in the way that takes most memory.

    Args:
        divisor: The step has so many times fewer tokens and requests, rounded up.
        block_size: Tokens per block of the KV cache, which has one block.
        num_draft_tokens: Most draft tokens of a request; each adds a row of logits.
    """
    scheduler, model = forward.config.scheduler, forward.config.model
    max_tokens, max_rows = -(-scheduler.max_num_batched_tokens // divisor), -(-scheduler.max_num_seqs // divisor)
    shape = profile_shape(forward.shapes(), max_tokens, max_rows, model.max_model_len, block_size)
    inputs = dummy_inputs(forward, shape, block_size=block_size)
    num_tokens = len(inputs.token_ids)
    adapters = forward.loader.lora_manager.largest_batch(num_tokens) if forward.loader.supports_lora else None
    hidden = forward.run(inputs, forward.pipeline.zero_hidden_states(num_tokens), adapters)
    if forward.pipeline.is_last and model.kind.generates:
        indices = inputs.logits_indices.repeat(1 + num_draft_tokens)[:num_tokens]
        profile_sampling(forward, make_sampler, forward.logits(hidden.index_select(0, indices), len(indices)))
    if (draft := forward.loader.draft) is not None:
        inputs.positions = inputs.positions.clamp(max=draft.config.max_model_len - 1)
        draft.forward(forward.layers).run(inputs, draft.combine(hidden, forward.layer_states))
    forward.runtime.synchronize()


def profile_sampling(forward: ModelForward, make_sampler: Callable[[], Sampler], logits: torch.Tensor) -> None:
    """Samples from each row of `logits` with the settings that take most memory."""
    num_rows, config = logits.shape[0], forward.config
    # As in real steps: a sampler that must not wait for the device filters the whole batch at once, and counts tokens
    # in a table on the device.
    on_device = keeps_sampled_tokens_on_device(config, forward.platform.capabilities)
    counts = None
    if on_device:
        counts = DeviceTokenCounts(
            forward.runtime.empty, num_rows, config.model.num_token_ids, config.model.max_model_len
        )
    params = SamplingParams(top_p=0.5, repetition_penalty=1.5, logprobs=0)
    state, history = _dummy_sampling_rows(config.model.num_token_ids, [params] * num_rows, counts)
    sampler = make_sampler()
    sampler.may_synchronize &= not on_device
    sampler.sample(logits, np.arange(num_rows), state, history)


def warm_up(
    forward: ModelForward, sampler: Sampler, buffer: SampledTokenBuffer | None, *, block_size: int, max_pages: int
) -> None:
    """Runs steps before the first request, so that no request waits for a compilation.

        static_shapes           a step of every shape, and every kind of sampling for each number of requests
        graphs, with `capture`  a step of many of these shapes, which is captured, see CaptureShapes
        graphs, with buckets    a decode step of each size, which is captured
        compile alone           a few steps, with which the compiler makes programs for any size
        lazy_kernels            in addition, prompts of one request, and the common kinds of sampling

    Which shapes the sampler has also depends on what requests ask for; only common settings are run.

    Args:
        buffer: Where sampled tokens stay on the device.
        max_pages: Blocks of the longest sequence.
    """
    shapes, scheduler = forward.shapes(), forward.config.scheduler
    limits = {"max_tokens": scheduler.max_num_batched_tokens, "max_rows": scheduler.max_num_seqs}
    if forward.is_static:
        all_shapes = step_shapes(
            shapes, **limits, max_pages=max_pages, block_size=block_size, with_states=forward.has_states
        )
        states = _run_all_shapes(forward, buffer, all_shapes, block_size)
        _warm_up_sampling(forward, sampler, buffer, states, warm_up_params(forward.config.model.num_token_ids))
    elif shapes.capture is not None:
        captured = capture_shapes(forward, shapes, **limits, block_size=block_size)
        _run_models(forward, captured, block_size, with_sample_rows=buffer is not None)
    elif forward.is_compiled and forward.platform.capabilities.graphs and shapes.requests is not None:
        _run_models(forward, decode_shapes(shapes, max_rows=scheduler.max_num_seqs), block_size)
    elif forward.is_compiled and forward.needs_warm_up:
        start = time.monotonic()
        few_shapes = dynamic_compile_shapes(shapes, **limits, max_pages=max_pages, block_size=block_size)
        _run_models(forward, few_shapes, block_size)
        forward.runtime.synchronize()
        logger.info("The model was compiled for steps of any size in %.1f s.", time.monotonic() - start)
    if forward.platform.capabilities.lazy_kernels and not (forward.is_static or forward.config.model.kind.is_encoder):
        one_request = single_request_shapes(
            shapes, max_tokens=limits["max_tokens"], max_pages=max_pages, block_size=block_size
        )
        states = _run_all_shapes(forward, buffer, one_request, block_size)
        _warm_up_sampling(forward, sampler, buffer, states, kernel_warm_up_params())
    forward.runtime.end_warm_up()


def _run_models(
    forward: ModelForward, shapes: Iterable[StepShape], block_size: int, *, with_sample_rows: bool = False
) -> None:
    """Runs the model for steps of these shapes, and the head if the platform captures it."""
    num_groups = len(forward.layers.groups)
    for shape in shapes:
        inputs = dummy_inputs(
            forward, shape, block_size=block_size, num_groups=num_groups, with_sample_rows=with_sample_rows
        )
        hidden = forward.run(inputs, forward.pipeline.zero_hidden_states(len(inputs.token_ids)))
        if forward.head is not None and inputs.layout.capture:
            forward.head.sample(hidden, inputs)
        forward.runtime.step_mark()


def _run_all_shapes(
    forward: ModelForward, buffer: SampledTokenBuffer | None, shapes: Iterable[StepShape], block_size: int
) -> dict[int, torch.Tensor]:
    """Runs a step of each shape.

    Returns:
        States whose logits are needed, by the padded number of requests.
    """
    states_by_size: dict[int, torch.Tensor] = {}
    for shape in shapes:
        # No request has more positions than max_model_len.
        most = shape.num_requests * forward.config.model.max_model_len
        inputs = dummy_inputs(
            forward,
            replace(shape, num_tokens=min(shape.num_tokens, most)),
            block_size=block_size,
            num_groups=len(forward.layers.groups),
            with_sample_rows=buffer is not None,
        )
        if buffer is not None:
            inputs.token_ids = buffer.replace_placeholders(inputs.token_ids)
        _, states = forward.compute(inputs, forward.pipeline.zero_hidden_states(shape.tokens))
        if states is not None:
            states_by_size[shape.requests] = states
    return states_by_size


def _warm_up_sampling(
    forward: ModelForward,
    sampler: Sampler,
    buffer: SampledTokenBuffer | None,
    states_by_size: dict[int, torch.Tensor],
    kinds: list[SamplingParams],
) -> None:
    """Runs each kind of sampling for each number of requests."""
    max_rows, vocab_size = forward.config.scheduler.max_num_seqs, forward.config.model.num_token_ids
    for size, states in states_by_size.items():
        num_rows = min(size, max_rows)
        for params in kinds:
            greedy = SamplingParams(temperature=0.0)
            state, history = _dummy_sampling_rows(vocab_size, [params] + [greedy] * (num_rows - 1))
            sampled = sampler.sample(forward.logits(states, num_rows), np.arange(num_rows), state, history)
            if buffer is not None:
                padding = np.full(size, max_rows, dtype=np.int32)
                buffer.store(sampled, forward.runtime.from_numpy(padding))
            sampled.send_to_host(forward.runtime.to_host)
            sampled.numpy()
            forward.runtime.step_mark()


def _dummy_sampling_rows(
    vocab_size: int, params: list[SamplingParams], counts: DeviceTokenCounts | None = None
) -> tuple[SamplingState, TokenHistory]:
    """Sampling state of a row for each of `params`, whose prompts have one token."""
    state = SamplingState(len(params), vocab_size, 0, device_counts=counts)
    history = TokenHistory(len(params), 2)
    for row, settings in enumerate(params):
        history.set_row(row, [0], 1)
        state.set_row(row, settings, eos_token_ids=[], request_id="warm-up", num_prompt_tokens=1)
    return state, history


def dummy_inputs(
    forward: ModelForward, shape: StepShape, *, block_size: int, num_groups: int = 1, with_sample_rows: bool = False
) -> StepInputs:
    """Inputs of a step of this shape, its tokens divided evenly among its requests.

    One copy brings them to the device, as in real steps.
    """
    num_tokens, num_requests = shape.num_tokens, shape.num_requests
    query_len, with_prompt_lens = -(-num_tokens // num_requests), forward.loader.model.uses_prompt_lens
    passes: tuple[int, ...] = ()
    if forward.has_states and shape.kind is StepKind.VERIFY:
        passes = (shape.requests,) * (shape.tokens // shape.requests)
    layout = BufferLayout(
        tokens=shape.tokens,
        requests=shape.requests,
        logits_rows=shape.tokens if shape.kind is StepKind.VERIFY else shape.requests,
        pages=shape.pages,
        prompt_lens=shape.tokens if with_prompt_lens else 0,
        sample_rows=shape.requests if with_sample_rows else 0,
        num_groups=num_groups,
        state_slots=shape.requests if forward.has_states else 0,
        state_passes=passes,
    )
    buffer = np.zeros(layout.size, dtype=np.int32)
    parts = layout.parts(buffer)
    _, positions, _, query_start_loc, seq_lens, logits_indices = parts[:6]
    positions[:] = np.arange(shape.tokens) % query_len
    query_start_loc[:] = np.minimum(np.arange(shape.requests + 1, dtype=np.int32) * query_len, num_tokens)
    seq_lens[:] = np.diff(query_start_loc)
    if shape.kind is not StepKind.VERIFY:  # otherwise zeros
        logits_indices[:] = np.maximum(query_start_loc[1:] - 1, 0)
    for slot_mapping_index, _ in layout.slot_and_table_indices:
        parts[slot_mapping_index][:] = -1
    for slots in parts[9:11]:
        slots[:] = -1
    if passes:
        write_padding(parts[layout.first_pass_part :])
    if with_sample_rows:
        parts[8][:] = forward.config.scheduler.max_num_seqs  # the row of padding
    views = layout.parts(forward.runtime.from_numpy(buffer))
    layouts = layout.layouts(
        layout.arrays_of_groups(parts, views),
        block_size=block_size,
        max_query_len=shape.captured_query_len or query_len,
        max_seq_len=query_len,
        kind=shape.kind,
        num_decodes=num_requests if query_len == 1 else 0,
        capture=shape.captured_query_len is not None,
    )
    return StepInputs(
        rows=np.arange(num_requests),
        num_scheduled=seq_lens[:num_requests],
        first_positions=np.zeros(num_requests, dtype=np.int32),
        sampling_positions=np.arange(num_requests),
        num_draft_tokens=np.zeros(num_requests, dtype=np.int32),
        token_ids=views[0],
        positions=views[1],
        logits_indices=views[5],
        layouts=layouts,
        prompt_lens=views[7] if with_prompt_lens else None,
        sample_rows=views[8] if with_sample_rows else None,
        state_layout=layout.state_layout(parts, views, layouts[0], is_static=forward.is_static),
        state_passes=pass_inputs(
            parts[layout.first_pass_part :], views[layout.first_pass_part :], passes, capture=layouts[0].capture
        )
        if passes
        else None,
        host_positions=positions,
        num_logits=num_requests,
        selects_all=not forward.is_static and num_requests == layout.logits_rows == layout.tokens,
    )


def profile_shape(
    shapes: ShapePolicy, max_tokens: int, max_rows: int, max_model_len: int, block_size: int
) -> StepShape:
    """The largest step that the limits allow, its tokens in requests of about equal length."""
    num_tokens = min(max_tokens, max_rows * max_model_len)
    query_len = -(-num_tokens // max_rows)
    num_requests = -(-num_tokens // query_len)
    return _padded_shape(shapes, num_tokens, num_requests, pages=-(-query_len // block_size))


def step_shapes(
    shapes: ShapePolicy, *, max_tokens: int, max_rows: int, max_pages: int, block_size: int, with_states: bool = False
) -> Iterator[StepShape]:
    """Every shape of a step within the limits, largest first. A dimension without buckets has its largest size.

    Args:
        with_states: The model has sequence states, so steps of as many tokens as requests after padding differ in
            whether a request has several tokens.
    """
    every = product(
        _buckets(shapes.tokens, max_tokens), _buckets(shapes.requests, max_rows), _buckets(shapes.pages, max_pages)
    )
    for (over_tokens, tokens), (over_requests, requests), (_, pages) in every:
        # A request has at least one token, and at most as many new tokens as its pages hold.
        room = requests * pages * block_size
        if over_tokens < room and over_requests < tokens:
            num_tokens = min(tokens, room)
            num_requests = min(requests, num_tokens)
            yield StepShape(tokens, requests, pages, num_tokens, num_requests)
            if with_states and tokens == requests and num_requests > 1 and pages * block_size > 1:
                half = num_requests // 2
                yield StepShape(tokens, requests, pages, min(num_tokens, half * pages * block_size), half)


def capture_shapes(
    forward: ModelForward, shapes: ShapePolicy, *, max_tokens: int, max_rows: int, block_size: int
) -> Iterator[StepShape]:
    """The captured steps that the warm-up runs, with as many requests and tokens as the limits allow."""
    assert shapes.capture is not None
    speculative = forward.config.speculative
    num_draft_tokens = 0 if speculative is None else speculative.num_speculative_tokens
    reachable = reachable_shapes(
        shapes.capture, max_tokens=max_tokens, max_rows=max_rows, num_draft_tokens=num_draft_tokens
    )
    for shape in warm_up_shapes(reachable):
        count = min(shape.requests, max_rows)
        query_len = min(shape.tokens // shape.requests, forward.config.model.max_model_len)
        tokens, pages = count * query_len, ShapePolicy.pad(-(-query_len // block_size), shapes.pages)
        yield StepShape(shape.tokens, shape.requests, pages, tokens, count, shape.kind, shape.max_query_len)


def decode_shapes(shapes: ShapePolicy, *, max_rows: int) -> Iterator[StepShape]:
    """Decode steps, one for each padded number of requests, largest first."""
    for size in sample_sizes(shapes, max_rows):
        count = min(size, max_rows)
        yield StepShape(ShapePolicy.pad(size, shapes.tokens), size, ShapePolicy.pad(1, shapes.pages), count, count)


def single_request_shapes(
    shapes: ShapePolicy, *, max_tokens: int, max_pages: int, block_size: int
) -> Iterator[StepShape]:
    """Steps of one request: a token, and prompts of 16 tokens, four times as many, and so on up to the limit.

    Kernels have tiles of a few sizes, which the length of the prompt selects.
    """
    most = min(max_tokens, max_pages * block_size)
    for num_tokens in sorted({1, *(size for size in (16, 64, 256, 1024, 4096, most) if size <= most)}):
        yield _padded_shape(shapes, num_tokens, 1, -(-num_tokens // block_size))


def dynamic_compile_shapes(
    shapes: ShapePolicy, *, max_tokens: int, max_rows: int, max_pages: int, block_size: int
) -> Iterator[StepShape]:
    """A few small steps in which every size is 1 once and has two other values. Shapes are distinct.

    A compiler for dynamic shapes specializes on size 1, and treats a size as dynamic after it has seen two values.
    """
    seen = set()
    for num_tokens, num_requests in ((1, 1), (block_size + 2, 1), (2, 2), (3 * (block_size + 1), 3)):
        num_requests = min(num_requests, max_rows)
        num_tokens = min(num_tokens, max_tokens, num_requests * max_pages * block_size)
        num_requests = min(num_requests, num_tokens)
        pages = -(-num_tokens // (num_requests * block_size))
        shape = _padded_shape(shapes, num_tokens, num_requests, pages)
        if (key := (shape.tokens, shape.requests, shape.pages)) not in seen:
            seen.add(key)
            yield shape


def sample_sizes(shapes: ShapePolicy, max_rows: int) -> list[int]:
    """Padded numbers of rows whose logits one step computes, largest first."""
    return [size for _, size in _buckets(shapes.requests, max_rows)]


def _padded_shape(shapes: ShapePolicy, num_tokens: int, num_requests: int, pages: int) -> StepShape:
    """The shape of a step of these sizes."""
    return StepShape(
        ShapePolicy.pad(num_tokens, shapes.tokens),
        ShapePolicy.pad(num_requests, shapes.requests),
        ShapePolicy.pad(pages, shapes.pages),
        num_tokens,
        num_requests,
    )


def _buckets(buckets: tuple[int, ...] | None, limit: int) -> list[tuple[int, int]]:
    """The buckets of sizes up to `limit`, largest first; each as (exclusive lower bound, bucket)."""
    if buckets is None:
        return [(0, limit)]
    used = [size for size in buckets if size < limit] + [ShapePolicy.pad(limit, buckets)]
    return list(zip([0, *used[:-1]], used))[::-1]
