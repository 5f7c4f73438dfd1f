"""Runs one step of the model on one rank: a plan of integers in, sampled tokens out.

    apply the plan to the rows -> build inputs -> forward pass -> sample -> append the sampled tokens to the rows

`execute_model` is that sequence, the same on every platform. What differs between platforms is behind the runtime, the
attention backends and the op providers.

Where the platform copies asynchronously and steps are planned ahead, `execute_model` returns when the work of the step
is submitted: sampled tokens stay on the device (SampledTokenBuffer), and `collect_output` reads them later.

Tensor parallel: all ranks of a group compute identical logits and draw the same random numbers, so they sample the same
tokens without communication. Pipeline parallel: the last stage samples and sends the tokens to the others
(PipelineTransport).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, TypeVar

import numpy as np
import torch

from mvllm.config.engine_config import EngineConfig, with_max_model_len
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import StepMemoryError
from mvllm.layers.lora import LoRAMapping
from mvllm.logging import get_logger
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.ops.argmax import argmax as reference_argmax
from mvllm.ops.dtypes import torch_dtype
from mvllm.ops.logsumexp import logsumexp as reference_logsumexp
from mvllm.ops.registry import REFERENCE
from mvllm.platform.interface import Platform
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.tokens_on_device import keeps_sampled_tokens_on_device
from mvllm.platform.worker_protocol import KVCacheNeeds
from mvllm.pooling.pooler import pool_step
from mvllm.sampling.logits_processor import LogitsProcessorContext
from mvllm.sampling.logits_processor_set import LogitsProcessorSet
from mvllm.sampling.logprobs import LogSumExp
from mvllm.sampling.penalties import DeviceTokenCounts
from mvllm.sampling.sampler import Sampler
from mvllm.sampling.sampler_output import SamplerOutput
from mvllm.sampling.sampling_state import PROCESSED, SamplingState
from mvllm.sampling.token_masks import TokenMasks
from mvllm.worker.encoder_runner import EncoderRunner, StepItemTensors
from mvllm.worker.garbage import collect_garbage
from mvllm.worker.greedy_head import Argmax
from mvllm.worker.host_blocks import HostBlocks, StepCopies
from mvllm.worker.inference_mode import in_inference_mode
from mvllm.worker.input_batch import InputBatch, RowLengths
from mvllm.worker.kv_cache_layers import KVCacheLayers
from mvllm.worker.model_forward import ModelForward
from mvllm.worker.model_loader import ModelLoader
from mvllm.worker.out_of_memory import all_ranks_failed_step, step_out_of_memory_error
from mvllm.worker.pair_sampling import PairSampling
from mvllm.worker.pipeline_transport import PipelineTransport
from mvllm.worker.prompt_logprobs import PromptLogprobsComputer
from mvllm.worker.sampled_token_buffer import SampledTokenBuffer
from mvllm.worker.spec_decode.held_drafts import HeldDrafts
from mvllm.worker.spec_decode.proposer import DraftStep, Proposer, make_proposer
from mvllm.worker.step_inputs import StepInputBuilder, StepInputs, ragged_ranges
from mvllm.worker.step_result import ComputedStep, StepResult
from mvllm.worker.warm_up import profile_step, sample_sizes, warm_up

logger = get_logger(__name__)

_FAILURE_EXCHANGE_DIVISOR = 10
"""Ranks that ran out of memory wait for each other for `step_timeout` divided by this."""

_Result = TypeVar("_Result")
_Output = TypeVar("_Output", ModelRunnerOutput, ModelRunnerOutput | None)
_UnsampledStep = tuple[SchedulerOutput, RowLengths, ComputedStep | ModelRunnerOutput | None]
"""The plan of a computed step, the rows' lengths before it, and the model's result; or the output of a failed step."""


class ModelRunner:
    """One rank's model, its KV cache and its rows.

    Args:
        config: The engine's configuration.
        platform: Gives attention backends, op providers and buckets.
        runtime: The bound device.
        tp, pp: The rank's tensor-parallel and pipeline-parallel groups.
        every_rank_answers, num_devices, rank: As in WorkerContext.

    Attributes:
        loader: The model, the draft model and the LoRA adapters.
        rows: State of the running requests, from `allocate_kv_cache` on.
        host_blocks: This rank's part of the host blocks, from `allocate_kv_cache` on.
        layers_class, loader_class, forward_class: The parts that a worker of another package replaces.
    """

    layers_class: ClassVar[type[KVCacheLayers]] = KVCacheLayers
    loader_class: ClassVar[type[ModelLoader]] = ModelLoader
    forward_class: ClassVar[type[ModelForward]] = ModelForward

    rows: InputBatch
    host_blocks: HostBlocks

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        runtime: DeviceRuntime,
        tp: GroupCoordinator,
        pp: GroupCoordinator,
        *,
        every_rank_answers: bool = False,
        num_devices: int = 1,
        rank: int = 0,
    ) -> None:
        self._config = config
        self._rank = rank
        self._platform = platform
        self._runtime = runtime
        self._tp, self._pp = tp, pp
        self._layers = self.layers_class(config, platform, runtime)
        self.loader = self.loader_class(config, platform, runtime, tp, pp, self._layers, num_devices=num_devices)
        self._pipeline = PipelineTransport(
            pp,
            runtime,
            hidden_size=config.model.hidden_size,
            dtype=torch_dtype(config.model.dtype),
            every_rank_answers=every_rank_answers,
        )
        self._forward = self.forward_class(config, platform, runtime, self.loader, self._layers, self._pipeline)
        self._num_speculative = 0 if config.speculative is None else config.speculative.num_speculative_tokens
        self._make_sampler: Callable[..., Sampler] = Sampler
        self._sampler = self._make_sampler()
        self._argmax: Argmax = reference_argmax
        self._logsumexp: LogSumExp = reference_logsumexp
        self._encoders = EncoderRunner(config, runtime, tp, pp, on_host=self.loader.encoders_on_host)
        self._proposer: Proposer | None = None
        self._held_drafts = HeldDrafts()
        self._sampled_token_buffer: SampledTokenBuffer | None = None
        self._step_awaiting_masks: _UnsampledStep | None = None
        self._num_state_slots = 0
        self._copies: dict[int, StepCopies] = {}  # by step, until its output is returned

    # ------------------------------------------------------------------------------------------------------ start

    def load_model(self) -> None:
        """Builds the model on the device and loads this rank's weights."""
        context = self.loader.load()
        vocab_size = self._config.model.num_token_ids
        filtered_draw = context.op("filtered_draw", size=vocab_size)
        self._argmax = context.op("argmax", size=vocab_size).function
        self._logsumexp = context.op("logsumexp", size=vocab_size).function
        float32_argmax = context.floats(torch.float32).op("argmax", size=vocab_size).function
        self._make_sampler = partial(
            Sampler,
            logprobs_mode=self._config.model.logprobs_mode,
            static=self._forward.is_static,
            argmax=self._argmax,
            logsumexp=self._logsumexp,
            filtered_draw=None if filtered_draw.provider == REFERENCE else filtered_draw.function,
        )
        self._sampler = self._make_sampler()
        self._pair_sampling = PairSampling(
            self._runtime,
            partial(self._make_sampler, argmax=float32_argmax),
            self._logsumexp,
            is_static=self._forward.is_static,
        )
        self._forward.bind_model()

    def kv_cache_needs(self) -> KVCacheNeeds:
        """As `KVCacheLayers.kv_cache_needs`."""
        return self._layers.kv_cache_needs()

    @in_inference_mode
    def profile(self, divisor: int = 1) -> None:
        """Runs the largest step that the limits allow on one block and one state slot, which are freed at the end.

        The caller reads the runtime's peak memory before and after.

        Args:
            divisor: Run a step of so many times fewer tokens and requests, rounded up.
        """
        block_size = self.kv_cache_needs().block_sizes[0]
        self._layers.allocate(1, block_size)
        self._layers.states.allocate(1, for_drafts=False)
        with step_out_of_memory_error(self._config.scheduler, self._runtime):
            profile_step(
                self._forward,
                self._make_sampler,
                divisor=divisor,
                block_size=block_size,
                num_draft_tokens=self._num_speculative,
            )
        self._layers.free_caches()

    def encoder_cache_bytes(self) -> int:
        """Most bytes of the encoder results that this rank keeps."""
        return self._encoders.max_cache_bytes

    @in_inference_mode
    def encode_largest_item(self) -> None:
        """Runs the encoder once over the largest item, if the model has an encoder that gives one."""
        with step_out_of_memory_error(self._config.scheduler, self._runtime):
            self._encoders.encode_largest_item(self.loader.model.item_encoder)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Shortens the longest sequence, before `allocate_kv_cache`. The model stays as it was built."""
        self._config = self._forward.config = with_max_model_len(self._config, max_model_len)

    def group_layers(self, windows: Sequence[int | None]) -> None:
        """Gives each group of layers its own block table.

        Args:
            windows: Tokens that the layers of each group attend to; None for all.
        """
        self._layers.set_groups(windows)
        self._forward.bind_model()

    def allocate_states(self, num_slots: int) -> None:
        """Allocates the sequence states of every layer, before `allocate_kv_cache`."""
        self._num_state_slots = num_slots
        self._layers.states.allocate(num_slots)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocates the KV cache of every layer, compiles the model, and makes the rows and buffers of steps."""
        self._num_blocks, self._block_size = num_blocks, block_size
        self._layers.allocate(num_blocks, block_size)
        self.host_blocks = HostBlocks(self._rank, self._layers, block_size)
        scheduler, model = self._config.scheduler, self._config.model
        max_rows, on_device = scheduler.max_num_seqs, self._keeps_tokens_on_device
        counts = None
        if on_device:
            counts = DeviceTokenCounts(self._runtime.empty, max_rows, model.num_token_ids, model.max_model_len)
        state = SamplingState(max_rows, model.num_token_ids, model.seed, self._logits_processors(), counts)
        num_groups = len(self._layers.groups)
        self.rows = InputBatch(
            max_rows,
            model.max_model_len,
            block_size,
            state,
            num_groups,
            list(model.token_spaces),
            model.has_non_causal_spans,
        )
        shapes = self._forward.shapes()
        self._inputs = StepInputBuilder(
            self.rows,
            block_size=block_size,
            max_tokens=scheduler.max_num_batched_tokens,
            max_rows=max_rows,
            runtime=self._runtime,
            shapes=shapes,
            with_prompt_lens=self.loader.model.uses_prompt_lens,
            with_sample_rows=on_device,
            max_draft_tokens=self._num_speculative,
            is_static=self._forward.is_static,
            with_states=self._layers.states.are_needed,
        )
        sizes = None if shapes.requests is None else tuple(reversed(sample_sizes(shapes, max_rows)))
        self._prompt_logprobs = PromptLogprobsComputer(self.rows, self._runtime, sizes, self._logsumexp)
        if on_device:
            self._sampled_token_buffer = SampledTokenBuffer(self._runtime, self.rows.history)
            self._sampler = self._make_sampler(self._inputs.staging)
        self._pair_sampling.set_rows(self.rows, self._inputs.staging if on_device else None)
        self._compile_models()

    @in_inference_mode
    def warm_up(self) -> None:
        """Runs steps before the first request, so that no request waits for a compilation."""
        buffer = self._sampled_token_buffer
        warm_up(self._forward, self._sampler, buffer, block_size=self._block_size, max_pages=self.rows.max_pages)

    @property
    def _keeps_tokens_on_device(self) -> bool:
        return keeps_sampled_tokens_on_device(self._config, self._platform.capabilities)

    def _logits_processors(self) -> LogitsProcessorSet | None:
        """The configured logits processors and those of requests, on the pipeline stage that samples."""
        if not self._pipeline.is_last:
            return None
        max_rows, vocab_size = self._config.scheduler.max_num_seqs, self._config.model.num_token_ids
        context = LogitsProcessorContext(vocab_size, max_rows, self._runtime.device)
        return LogitsProcessorSet(self._config.logits_processors, context)

    def _compile_models(self) -> None:
        """Compiles the model, and makes the proposer. The KV cache must be allocated."""
        if not self._config.model.kind.is_encoder:
            self._forward.compile_model(self._argmax, self._sampled_token_buffer)
            self._proposer = make_proposer(self._forward, self.rows, self._make_sampler, self._block_size)

    def drop_captured_steps(self) -> None:
        """Compiles the model anew, after weights have moved to other memory. `warm_up` follows."""
        self._runtime.synchronize()
        if self._forward.decoder is not None and not self._layers.has_missing_caches:
            self._forward.decoder.drop_compiled()
            self._proposer = None
            self._compile_models()

    # ------------------------------------------------------------------------------------------------ sleep and end

    def sleep(self, *, drop_weights: bool) -> None:
        """Frees the KV cache and states, and with `drop_weights` the model. Rows and buffers stay: they are small."""
        self._runtime.synchronize()
        self._forward.drop_compiled()
        self._proposer = None
        self._layers.free_caches()
        self._encoders.clear()
        if self.rows.sampling.device_counts is not None:
            self.rows.sampling.device_counts.free()
        if drop_weights:
            self._drop_models()
        collect_garbage()

    def wake_up(self, tags: Sequence[str]) -> None:
        """Restores the parts that `tags` names (`weights`, `kv_cache`), where they are missing.

        Raises:
            CacheError, ModelError: There is no memory for it now. What was there stays.
        """
        if "weights" in tags and not self.loader.is_loaded:
            samplers = self._sampler, self._pair_sampling
            try:
                self.load_model()
            except BaseException:
                self._drop_models()
                collect_garbage()
                raise
            self._sampler, self._pair_sampling = samplers
        if "kv_cache" in tags and self._layers.has_missing_caches:
            try:
                self._layers.allocate(self._num_blocks, self._block_size)
                self._layers.states.allocate(self._num_state_slots)
            except BaseException:
                self._layers.free_caches()
                raise
            self._compile_models()

    def close(self) -> None:
        """Drops the model, the KV cache, and compiled and captured steps. Idempotent.

        The worker leaves its process groups afterwards: a captured step refers to their communicators.
        """
        self._forward.release()
        self._proposer = None
        self.loader.unload()

    def _drop_models(self) -> None:
        self._forward.release()
        self.loader.unload()

    # ------------------------------------------------------------------------------------------------------- steps

    @in_inference_mode
    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs one step, or submits it and returns None, see `collect_output`.

        On a pipeline stage but the last, the output has no tokens.
        """
        self._pipeline.apply_pending_outputs(plan, self.rows)
        if self._proposer is not None and plan.freed_rows:
            self._proposer.on_requests_removed(plan.freed_rows)
        planned, plan = plan, self._take_drafts(plan)
        self.rows.apply_plan(plan)
        if plan.freed_encoder_outputs:
            self._encoders.free(plan)
        if plan.has_host_copies:
            self._copies[plan.step] = self.host_blocks.start(plan)
        if self._proposer is not None and plan.new_requests:
            self._proposer.on_requests_added([request.row for request in plan.new_requests])
        if not plan.rows:
            self._pipeline.skip_step(plan.step)
            return self._with_copies_done(ModelRunnerOutput(step=plan.step))
        before = self.rows.copy_lengths()
        if plan.masks_follow:
            self._step_awaiting_masks = plan, before, self._attempt(plan, before, partial(self._forward_step, plan))
            self._runtime.step_mark()
            return None
        output = self._attempt(plan, before, partial(self._run_step, plan))
        self._runtime.step_mark()
        self._inputs.staging.end_step()
        if output is not None and plan is not planned:
            output.num_draft_tokens = {position: len(drafts) for position, drafts in plan.draft_token_ids.items()}
        return self._with_copies_done(output)

    def _take_drafts(self, plan: SchedulerOutput) -> SchedulerOutput:
        """The plan with the draft tokens that were proposed for its rows, where it has placeholders for them."""
        if self._num_speculative:
            self._held_drafts.drop(plan.freed_rows)
            plan = self._held_drafts.fill(plan)
            self._held_drafts.drop(plan.rows)
        return plan

    @in_inference_mode
    def sample_tokens(self, step: int, mask_rows: list[int], token_masks: bytes) -> ModelRunnerOutput | None:
        """Samples the step that `execute_model` computed last without sampling it. See WorkerProtocol."""
        assert self._step_awaiting_masks is not None and self._step_awaiting_masks[0].step == step, (
            f"step {step} does not wait for masks"
        )
        (plan, before, computed), self._step_awaiting_masks = self._step_awaiting_masks, None
        plan.mask_rows, plan.token_masks = mask_rows, token_masks
        output: ModelRunnerOutput | None
        if isinstance(computed, ComputedStep):
            output = self._attempt(plan, before, partial(self._sample_step, plan, computed))
        else:
            output = computed  # the forward pass has failed
        self._runtime.step_mark()
        self._inputs.staging.end_step()
        return self._with_copies_done(output)

    def _with_copies_done(self, output: _Output) -> _Output:
        """`output`, after the end of its step's copies to and from host blocks; None, whose step has not ended."""
        if output is not None and (copies := self._copies.pop(output.step, None)) is not None:
            copies.wait()
        return output

    def _attempt(
        self, plan: SchedulerOutput, before: RowLengths, work: Callable[[], _Result]
    ) -> _Result | ModelRunnerOutput | None:
        """The result of `work`; or the output of a failed step if every rank ran out of memory in it.

        Args:
            before: The rows' lengths when the step began.
        """
        try:
            with step_out_of_memory_error(self._config.scheduler, self._runtime):
                return work()
        except StepMemoryError as e:
            if not self._all_ranks_failed(plan):
                raise  # other ranks wait for this one in a collective
            failure = str(e)
        # Behind the except clause: the frames of the failure, and the tensors in them, are freed by now.
        self.rows.advance_past_failed_step(plan, before)
        return self._fail_step(plan, failure)

    def _run_step(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs and samples a step whose plan has been applied to the rows and is not empty."""
        return self._sample_step(plan, self._forward_step(plan))

    def _forward_step(self, plan: SchedulerOutput) -> ComputedStep:
        """Builds the inputs of a step and runs the encoders of its items and the model."""
        if plan.encoder_inputs:
            self._encoders.encode(self.loader.model.item_encoder, plan.encoder_inputs)
        inputs = self._inputs.build(plan)
        if self._sampled_token_buffer is not None and self._forward.head is None:
            inputs.token_ids = self._sampled_token_buffer.replace_placeholders(inputs.token_ids)
        intermediate = self._pipeline.receive_hidden(inputs.layout.num_tokens)
        items = None if inputs.items is None else self._encoders.tensors(inputs.items, inputs)
        computed = self.compute_step(plan, inputs, intermediate, items)
        self.rows.num_computed[inputs.rows] += inputs.num_scheduled
        # A draft token counts as computed once it is accepted.
        if plan.draft_token_ids:
            self.rows.num_computed[inputs.rows[inputs.sampling_positions]] -= inputs.num_draft_tokens
        return computed

    def compute_step(
        self,
        plan: SchedulerOutput,
        inputs: StepInputs,
        intermediate: torch.Tensor | None,
        items: StepItemTensors | None,
    ) -> ComputedStep:
        """Runs the model.

        Args:
            plan: The step's plan.
            inputs: Its inputs.
            intermediate: Hidden states of the previous pipeline stage; None on the first.
            items: Images, audio and embeddings in the step; None without any.
        """
        adapters = self.lora_batch_of(inputs)
        hidden, states = self._forward.compute(inputs, intermediate, adapters, self.rows.pooling, items)
        return ComputedStep(inputs, hidden, states)

    def _sample_step(self, plan: SchedulerOutput, computed: ComputedStep) -> ModelRunnerOutput | None:
        """On the last stage, samples; on the others, sends the hidden states to the next stage."""
        if self._pipeline.is_last:
            return self._sample_last_stage(plan, computed)
        inputs = computed.inputs
        assert computed.hidden is not None
        self._pipeline.send_hidden(computed.hidden)
        if inputs.items is not None and self._pipeline.is_first:  # in the order in which the last stage receives
            self._pipeline.send_item_report(inputs.items.errors, self._encoders.pop_seconds())
        self._pipeline.expect_output(plan.step, inputs.rows, inputs.sampling_positions)
        return ModelRunnerOutput(step=plan.step)

    def _all_ranks_failed(self, plan: SchedulerOutput) -> bool:
        """Whether all ranks have failed in this step, so that none waits for another.

        Always false with pipeline parallelism: earlier stages have finished the step.
        """
        if self._pp.world_size > 1:
            return False
        seconds = self._config.parallel.step_timeout / _FAILURE_EXCHANGE_DIVISOR
        return all_ranks_failed_step(self._tp, self._runtime, plan.step, seconds)

    def _fail_step(self, plan: SchedulerOutput, reason: str) -> ModelRunnerOutput | None:
        """The output of a step in which all requests have failed. The engine goes on without them."""
        logger.error("Step %d with %d requests failed: %s", plan.step, len(plan.rows), reason)
        self._runtime.release_cached_memory()
        num_rows = len(plan.rows)
        output = ModelRunnerOutput(plan.step, [-1] * num_rows, errors=dict.fromkeys(range(num_rows), reason))
        if self._sampled_token_buffer is None:
            return output
        self._sampled_token_buffer.add_failed_step(output)
        return None

    def collect_output(self, step: int) -> ModelRunnerOutput:
        """The output of a step for which `execute_model` returned None; on a pipeline stage but the last, the output
        that the last stage has sent.
        """
        if self._sampled_token_buffer is not None:
            return self._with_copies_done(self._sampled_token_buffer.collect_output(step))
        return self._pipeline.collect_output(step, self.rows)

    def lora_batch_of(self, inputs: StepInputs) -> LoRAMapping | None:
        """The LoRA adapters of a step's requests; None if none has one."""
        if not self.loader.supports_lora:
            return None
        ids = self.rows.lora_ids[inputs.rows]
        if not ids.any():
            return None
        return self.loader.lora_manager.prepare_batch(ids, inputs.num_scheduled, len(inputs.token_ids))

    def _sample_last_stage(self, plan: SchedulerOutput, computed: ComputedStep) -> ModelRunnerOutput | None:
        """Samples, pools and computes prompt log-probabilities; reads the results unless they stay on the device."""
        inputs, hidden = computed.inputs, computed.hidden
        positions = inputs.sampling_positions
        result = StepResult(plan.step, inputs.rows, positions, computed.sampled, draft_token_ids=plan.draft_token_ids)
        if inputs.items is not None and self._pipeline.is_first:
            result.item_errors, result.encoder_seconds = inputs.items.errors, self._encoders.pop_seconds()
        elif inputs.items is not None:
            result.item_errors, result.encoder_seconds = self._pipeline.receive_item_report()
        if hidden is not None and self.rows.prompt_logprobs:
            result.prompt_logprobs_chunks = self._prompt_logprobs.compute(inputs, hidden, self._forward.prompt_logits)
        if hidden is not None and self.rows.pooling.params:
            result.pooled = pool_step(
                self.rows.pooling,
                self._runtime,
                hidden,
                rows=inputs.rows.tolist(),
                starts=inputs.layout.query_start_loc.tolist(),
                firsts=inputs.first_positions.tolist(),
                prompt_lens=self.rows.history.num_prompt_tokens[inputs.rows].tolist(),
                scores=self.loader.model.scores,
            )
        if hidden is not None and len(positions):
            masks = TokenMasks(plan.mask_rows, plan.token_masks) if plan.mask_rows else None
            result.sampled = self._sample(inputs, hidden, computed.states, masks)
        if self._sampled_token_buffer is not None:
            self._sampled_token_buffer.add_step(result)
            return None
        output, tokens = result.read()
        accepted = {plan.rows[position]: drafts for position, drafts in output.further_token_ids.items()}
        self.rows.append_sampled_tokens(inputs.rows[positions], tokens, accepted)
        if self._num_speculative:
            self._held_drafts.hold_slots(plan, output.further_token_ids)
        if self._proposer is not None:
            hidden = torch.empty(0, self._config.model.hidden_size) if hidden is None else hidden
            output.draft_token_ids = self._propose_drafts(self._proposer, plan, computed.inputs, hidden, output)
        if not self._pipeline.is_first:
            self._pipeline.send_output(output, any_sampled=len(tokens) > 0)
        return output

    def _propose_drafts(
        self,
        proposer: Proposer,
        plan: SchedulerOutput,
        inputs: StepInputs,
        hidden: torch.Tensor,
        output: ModelRunnerOutput,
    ) -> dict[int, list[int]]:
        """Draft tokens by position in the batch."""
        positions = inputs.sampling_positions
        # Logits processors need every token before the next one is sampled: such rows get no drafts.
        excluded = (self.rows.sampling.flags[inputs.rows[positions]] & PROCESSED).astype(bool)
        output.undrafted = positions[excluded].tolist()
        if self.rows.pairs.num_pairs:
            excluded |= np.isin(inputs.rows[positions], self.rows.pairs.rows)
        if output.errors:
            excluded |= np.isin(positions, list(output.errors))
        positions = positions[~excluded]
        step = DraftStep(
            inputs.rows[positions],
            np.delete(inputs.rows, positions),
            inputs,
            self._num_speculative if plan.max_draft_tokens is None else plan.max_draft_tokens,
            hidden,
            self._forward.layer_states,
        )
        drafts = proposer.propose(step)
        self._held_drafts.hold({row: tokens for row, tokens in zip(step.rows.tolist(), drafts, strict=True) if tokens})
        return {position: tokens for position, tokens in zip(positions.tolist(), drafts, strict=True) if tokens}

    def _upload_masks(self, inputs: StepInputs, masks: TokenMasks | None) -> torch.Tensor | None:
        """uint8 [L, vocab / 8], device: the token mask of each row of logits, padding included; None without masks."""
        if masks is None:
            return None
        num_rows, width = len(inputs.logits_indices), -(-self._config.model.vocab_size // 8)
        host = self._inputs.staging.buffer(num_rows * width, torch.uint8)[: num_rows * width]
        rows, counts = inputs.rows[inputs.sampling_positions], inputs.num_logits_rows
        masks.fill_bytes(host.numpy().reshape(num_rows, width), rows.repeat(counts), ragged_ranges(0 * counts, counts))
        return self._inputs.staging.copy_to_device(host).view(num_rows, width)

    def _sample(
        self, inputs: StepInputs, hidden: torch.Tensor, states: torch.Tensor | None, masks: TokenMasks | None
    ) -> SamplerOutput:
        """Samples for the rows that have reached the end of their known tokens."""
        state, history = self.rows.sampling, self.rows.history
        rows, seq_lens = inputs.rows[inputs.sampling_positions], None
        has_pairs, spaces = self.rows.pairs.num_pairs > 0, self.rows.spaces.of(rows)
        if states is None:
            if not has_pairs and spaces is None and state.samples_greedily(rows):
                assert self._forward.head is not None
                sampled = self._forward.head.sample(hidden, inputs, self._upload_masks(inputs, masks))
                if self._sampled_token_buffer is None:
                    sampled.send_to_host(self._runtime.to_host)
                return sampled
            states = self._forward.select_states(hidden, inputs)
            assert states is not None
        if inputs.num_draft_tokens.any():
            seq_lens = ragged_ranges(history.num_tokens[rows], inputs.num_logits_rows)
            rows = rows.repeat(inputs.num_logits_rows)
        logits = self._forward.logits(states, len(rows), spaces)
        if self._sampled_token_buffer is not None and history.ends_in_placeholder(
            state.rows_reading_tokens(rows, history.num_tokens[rows])
        ):
            self._sampled_token_buffer.read_all_steps()  # while the device computes
        if has_pairs and (pairs := self.rows.pairs.pairs_of(rows)).size:
            sampled = self._pair_sampling.sample(logits, rows, pairs, masks, seq_lens)
        else:
            sampled = self._sampler.sample(logits, rows, state, history, masks=masks, seq_lens=seq_lens)
        del logits  # a lazy tensor that is still referenced becomes an output of the program: not what was warmed up
        if self._sampled_token_buffer is not None:
            assert inputs.sample_rows is not None
            self._sampled_token_buffer.store(sampled, inputs.sample_rows)
            if state.device_counts is not None:
                state.device_counts.add(sampled.token_ids, inputs.sample_rows)
        else:
            sampled.send_to_host(self._runtime.to_host)
        return sampled
