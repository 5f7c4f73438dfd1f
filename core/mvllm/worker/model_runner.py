"""Runs the model: the one place where a plan of integers becomes tensors, and tensors become tokens.

`execute_model` is the whole story: bring the rows up to the plan, build the inputs, run the model, sample where a row
has reached the end of its known tokens, remember the samples. It is the same for every platform; what differs comes in
through the runtime, the attention backends and the op providers.

Where the platform copies asynchronously, and steps are planned ahead, a step ends when its work is submitted: its
tokens stay on the device, the next step finds them there (SampledTokenBuffer), and `collect_output` reads them later.

Tensor parallel: all ranks of a group see the same logits, bit for bit (each band is computed once and copied to all),
draw with the same numbers, and so sample the same tokens; nothing has to be told. Pipeline parallel: the last stage
samples, and `Pipeline` tells the others.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from mvllm.config.engine_config import EngineConfig
from mvllm.config.speculative import SpeculativeConfig
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import StepMemoryError
from mvllm.layers.context import ForwardStep
from mvllm.layers.lora import LoRAMapping
from mvllm.logging import get_logger
from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.ops.dtypes import torch_dtype
from mvllm.ops.registry import REFERENCE
from mvllm.platform.attention import AttentionMetadata
from mvllm.platform.checked_calls import call_checked
from mvllm.platform.graphs import CompileBackend
from mvllm.platform.interface import Platform
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.shapes import ShapePolicy
from mvllm.platform.tokens_on_device import keeps_sampled_tokens_on_device
from mvllm.platform.worker_protocol import KVCacheNeeds
from mvllm.pooling.pooler import pool_step
from mvllm.pooling.token_type_ids import make_token_type_ids
from mvllm.sampling.logits_processor import LogitsProcessorContext
from mvllm.sampling.logits_processor_set import LogitsProcessorSet
from mvllm.sampling.penalties import DeviceTokenCounts
from mvllm.sampling.sampler import Sampler, warm_up_params
from mvllm.sampling.sampler_output import SamplerOutput
from mvllm.sampling.sampling_state import PROCESSED, SamplingState, TokenHistory
from mvllm.sampling.token_masks import TokenMasks
from mvllm.worker.input_batch import InputBatch, RowLengths
from mvllm.worker.kv_cache_layers import AttentionGroups, KVCacheLayers
from mvllm.worker.lora_model_manager import LoRAModelManager
from mvllm.worker.model_loader import ModelLoader
from mvllm.worker.out_of_memory import all_ranks_failed_step, step_out_of_memory_error
from mvllm.worker.pipeline_transport import PipelineTransport
from mvllm.worker.prompt_logprobs import PromptLogprobsComputer
from mvllm.worker.sampled_token_buffer import SampledTokenBuffer
from mvllm.worker.spec_decode.draft_model import DraftModelProposer
from mvllm.worker.spec_decode.proposer import NgramProposer, Proposer
from mvllm.worker.step_inputs import StepInputBuilder, StepInputs, dummy_inputs, profiling_inputs
from mvllm.worker.step_result import StepResult
from mvllm.worker.warm_up import StepShape, decode_shapes, dynamic_compile_shapes, sample_sizes, step_shapes

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM

logger = get_logger(__name__)

_FAILURE_EXCHANGE_DIVISOR = 10
"""Ranks that find no memory wait for each other this part of what a step may take at most."""

_Result = TypeVar("_Result")
_Computed = tuple[StepInputs, torch.Tensor, torch.Tensor | None]
"""A step's inputs, hidden states, and states of the lines whose logits are wanted."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _in_inference_mode(method: _Method) -> _Method:
    """Runs a method of the runner in the device's inference mode."""

    @wraps(method)
    def within(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        with self._runtime.inference_mode():
            return method(self, *args, **kwargs)

    return cast(_Method, within)


class ModelRunner:
    """One rank's model, its KV cache and its rows.

    Args:
        config: The engine's configuration.
        platform: Gives attention backends, op providers and buckets.
        runtime: The bound device.
        tp, pp: The rank's tensor-parallel and pipeline-parallel groups.
        every_rank_answers, num_devices: As in WorkerContext.
    """

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
    ) -> None:
        self._config = config
        self._platform = platform
        self._runtime = runtime
        self._tp, self._pp = tp, pp
        self._attention = KVCacheLayers(config, platform, runtime)
        self._models = ModelLoader(config, platform, runtime, tp, pp, self._attention, num_devices=num_devices)
        self._attention_groups: AttentionGroups = {}
        """Those of the model's layers."""
        self._proposer: Proposer | None = None
        self._num_speculative = 0 if config.speculative is None else config.speculative.num_speculative_tokens
        self._make_sampler: Callable[..., Sampler] = Sampler
        self._sampler = self._make_sampler()
        self._run_model: Callable[..., torch.Tensor] = self._call_model
        self._compiler_needs_warm_up = False
        self._sampled_token_buffer: SampledTokenBuffer | None = None
        self._step_awaiting_masks: tuple[SchedulerOutput, RowLengths, _Computed | ModelRunnerOutput | None] | None = (
            None
        )
        """The step that waits for its masks, the rows' lengths when it began, and the model's result, or the output of
        the step if it has failed."""
        self._pipeline = PipelineTransport(
            pp,
            runtime,
            hidden_size=config.model.hidden_size,
            dtype=torch_dtype(config.model.dtype),
            every_rank_answers=every_rank_answers,
        )

    @property
    def model(self) -> CausalLM:
        """The model that is served; not to be asked for while there is none."""
        return self._models.model

    @property
    def lora_manager(self) -> LoRAModelManager:
        """The LoRA adapters.

        Raises:
            ConfigError: The engine takes none.
        """
        return self._models.lora_manager

    def load_model(self) -> None:
        """Builds the model on the device and loads this rank's weights."""
        context = self._models.load()
        vocab_size = self._config.model.vocab_size
        drawn = context.op("filtered_draw", size=vocab_size)
        self._make_sampler = partial(
            Sampler,
            static=self._static,
            argmax=context.op("argmax", size=vocab_size).function,
            filtered_draw=None if drawn.provider == REFERENCE else drawn.function,
        )
        self._sampler = self._make_sampler()
        self._attention_groups = self._attention.attention_groups_of(self.model.attention_layers())

    def kv_cache_needs(self) -> KVCacheNeeds:
        """What one token costs over all layers, and the block sizes that all backends accept.

        Raises:
            CacheError: The backends have no block size in common.
        """
        return self._attention.kv_cache_needs()

    def group_layers(self, windows: Sequence[int | None]) -> None:
        """Gives the layers of each group a block table of their own: what they see, in tokens, or None for all."""
        self._attention.set_groups(windows)
        self._attention_groups = self._attention.attention_groups_of(self.model.attention_layers())

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Claims the KV cache of every layer, and readies the model and the rows for steps."""
        self._num_blocks, self._block_size = num_blocks, block_size
        self._attention.allocate(num_blocks, block_size)
        scheduler, model = self._config.scheduler, self._config.model
        on_device = keeps_sampled_tokens_on_device(self._config, self._platform.capabilities)
        counts = self._device_counts(scheduler.max_num_seqs) if on_device else None
        state = SamplingState(scheduler.max_num_seqs, model.vocab_size, model.seed, self._logits_processors(), counts)
        self.rows = InputBatch(
            scheduler.max_num_seqs, model.max_model_len, block_size, state, len(self._attention.groups)
        )
        shapes: ShapePolicy = call_checked(self._platform, "shapes", returns=ShapePolicy)
        self._inputs = StepInputBuilder(
            self.rows,
            block_size=block_size,
            max_tokens=scheduler.max_num_batched_tokens,
            max_rows=scheduler.max_num_seqs,
            runtime=self._runtime,
            shapes=shapes,
            with_prompt_lens=self.model.uses_prompt_lens,
            with_sample_rows=on_device,
            max_drafts=self._num_speculative,
            every_request_samples=self._static,
        )
        sizes = None if shapes.requests is None else tuple(reversed(sample_sizes(shapes, scheduler.max_num_seqs)))
        self._prompt_logprobs = PromptLogprobsComputer(self.rows, self._runtime, sizes)
        if on_device:
            self._sampled_token_buffer = SampledTokenBuffer(self._runtime, self.rows.history)
            self._sampler = self._make_sampler(self._inputs.staging)
        self._compile_models()

    def sleep(self, *, drop_weights: bool) -> None:
        """Gives up the KV cache, and the model itself if asked to. Rows and buffers stay: they are small."""
        self._runtime.synchronize()
        self._run_model = self._call_model  # what was compiled may hold on to both
        self._proposer = None
        self._attention.free_caches()
        if self.rows.sampling.device_counts is not None:
            self.rows.sampling.device_counts.free()
        if drop_weights:
            self._drop_models()

    def wake_up(self, tags: Sequence[str]) -> None:
        """Brings back what `tags` name of `weights` and `kv_cache`, where it is missing.

        Raises:
            CacheError, ModelError: It cannot be had now; what there was before stays.
        """
        if "weights" in tags and not self._models.is_loaded:
            sampler = self._sampler
            try:
                self.load_model()
            except BaseException:
                self._drop_models()
                raise
            self._sampler = sampler
        if "kv_cache" in tags and self._attention.has_missing_caches:
            self._attention.allocate(self._num_blocks, self._block_size)
            self._compile_models()

    def close(self) -> None:
        """Lets go of the model, the KV cache, and what replays both. Idempotent.

        The worker leaves its groups afterwards: a captured step holds their communicators.
        """
        self._run_model = (
            _raise_closed  # nor may the method, which holds this object: nobody waits for garbage to be found
        )
        self._proposer = None
        self._models.unload()

    def _drop_models(self) -> None:
        self._models.unload()
        gc.collect()  # modules and what compiles or replays them refer to each other

    @_in_inference_mode
    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs one step, or submits it and returns None, see `collect_output`.

        On a pipeline stage but the last, the output has no tokens.
        """
        self._pipeline.apply_pending_outputs(plan, self.rows)
        self.rows.apply_plan(plan)
        if self._proposer is not None and plan.new_requests:
            self._proposer.on_requests_added([request.row for request in plan.new_requests])
        if not plan.rows:
            self._pipeline.skip_step(plan.step)
            return ModelRunnerOutput(step=plan.step)
        before = self.rows.copy_lengths()
        if plan.masks_follow:
            self._step_awaiting_masks = plan, before, self._attempt(plan, before, partial(self._forward_step, plan))
            self._runtime.step_mark()
            return None
        output = self._attempt(plan, before, partial(self._run_step, plan))
        self._runtime.step_mark()
        self._inputs.staging.end_step()
        return output

    @_in_inference_mode
    def sample_tokens(self, step: int, mask_rows: list[int], token_masks: bytes) -> ModelRunnerOutput | None:
        """Samples the step that has been computed last, as `execute_model` would have. See WorkerProtocol."""
        assert self._step_awaiting_masks is not None and self._step_awaiting_masks[0].step == step, (
            "no such step waits for its masks"
        )
        (plan, before, begun), self._step_awaiting_masks = self._step_awaiting_masks, None
        plan.mask_rows, plan.token_masks = mask_rows, token_masks
        output: ModelRunnerOutput | None
        if isinstance(begun, tuple):
            output = self._attempt(plan, before, partial(self._sample_step, plan, *begun))
        else:
            output = begun  # it has failed
        self._runtime.step_mark()
        self._inputs.staging.end_step()
        return output

    def _attempt(
        self, plan: SchedulerOutput, before: RowLengths, work: Callable[[], _Result]
    ) -> _Result | ModelRunnerOutput | None:
        """The result of `work`; or, where neither this rank nor another finds memory for it, the output of a step that
        has failed.

        Args:
            before: The rows' lengths when the step began.
        """
        try:
            with step_out_of_memory_error(self._config.scheduler, self._runtime):
                return work()
        except StepMemoryError as e:
            if not self._all_ranks_failed(plan):
                raise  # the others wait for this rank's part
            failure = str(e)
        self.rows.advance_past_failed_step(
            plan, before
        )  # the frames of the failure, and what they held, are gone by now
        return self._fail_step(plan, failure)

    def _run_step(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """As `execute_model`, for a plan that has been applied to the rows, and has some."""
        return self._sample_step(plan, *self._forward_step(plan))

    def _forward_step(self, plan: SchedulerOutput) -> _Computed:
        """Runs the model."""
        inputs = self._inputs.build(plan)
        if self._sampled_token_buffer is not None:
            inputs.token_ids = self._sampled_token_buffer.replace_placeholders(inputs.token_ids)
        hidden, states = self._compute(
            inputs, self._pipeline.receive_hidden(len(inputs.token_ids)), self._lora_batch_of(inputs)
        )
        self.rows.num_computed[inputs.rows] += inputs.num_scheduled
        # Guesses count when they are known to be right.
        self.rows.num_computed[inputs.rows[inputs.sampling]] -= inputs.num_draft_tokens
        return inputs, hidden, states

    def _sample_step(
        self, plan: SchedulerOutput, inputs: StepInputs, hidden: torch.Tensor, states: torch.Tensor | None
    ) -> ModelRunnerOutput | None:
        """Samples, or hands on what the model gave."""
        if self._pipeline.is_last:
            return self._sample_last_stage(plan, inputs, hidden, states)
        self._pipeline.send_hidden(hidden)
        self._pipeline.expect_output(plan.step, inputs.rows, inputs.sampling)
        return ModelRunnerOutput(step=plan.step)

    def _all_ranks_failed(self, plan: SchedulerOutput) -> bool:
        """Whether all ranks have failed in this step, so that none waits for another. Not asked of stages: those before
        this one have handed it on and are elsewhere.
        """
        if self._pp.world_size > 1:
            return False
        seconds = self._config.parallel.step_timeout / _FAILURE_EXCHANGE_DIVISOR
        return all_ranks_failed_step(self._tp, self._runtime, plan.step, seconds)

    def _fail_step(self, plan: SchedulerOutput, reason: str) -> ModelRunnerOutput | None:
        """What there is to tell of a step that has failed for all of its rows; the engine goes on without these."""
        logger.error("Step %d, of %d requests, fails: %s", plan.step, len(plan.rows), reason)
        self._runtime.release_cached_memory()
        nothing = [-1] * len(plan.rows)
        output = ModelRunnerOutput(plan.step, nothing, errors=dict.fromkeys(range(len(nothing)), reason))
        if self._sampled_token_buffer is None:
            return output
        self._sampled_token_buffer.add_failed_step(output)
        return None

    def collect_output(self, step: int) -> ModelRunnerOutput:
        """The output of a step that `execute_model` returned None for; or, on a pipeline stage but the last, what the
        last one made of `step`.
        """
        if self._sampled_token_buffer is not None:
            return self._sampled_token_buffer.collect_output(step)
        return self._pipeline.collect_output(step, self.rows)

    @_in_inference_mode
    def profile(self, part: int = 1) -> None:
        """Runs the largest step that the limits allow, on a one-block KV cache that it does not write.

        The caller reads the runtime's peak memory before and after. The cache is dropped again at the end.

        Args:
            part: Run a step of so many times fewer tokens and requests, rounded up.
        """
        block_size = self.kv_cache_needs().block_sizes[0]
        self._attention.allocate(1, block_size)
        scheduler = self._config.scheduler
        inputs = profiling_inputs(
            max_tokens=-(-scheduler.max_num_batched_tokens // part),
            max_rows=-(-scheduler.max_num_seqs // part),
            max_model_len=self._config.model.max_model_len,
            block_size=block_size,
            runtime=self._runtime,
            shapes=call_checked(self._platform, "shapes", returns=ShapePolicy),
            with_prompt_lens=self.model.uses_prompt_lens,
        )
        num_tokens = len(inputs.token_ids)
        adapters = self.lora_manager.largest_batch(num_tokens) if self._models.supports_lora else None
        with step_out_of_memory_error(scheduler, self._runtime):
            hidden = self._forward(inputs, self._pipeline.zero_hidden_states(num_tokens), adapters)
            if self._pipeline.is_last and self._config.model.kind.generates:
                lines = inputs.logits_indices.repeat(1 + self._num_speculative)[:num_tokens]
                self._profile_sampling(self.model.compute_logits(hidden.index_select(0, lines)))
            if (draft := self._models.draft) is not None:
                draft.run(inputs, self._attention.attention_groups_of(draft.layers))
            self._runtime.synchronize()
        self._attention.free_caches()

    @_in_inference_mode
    def warm_up(self) -> None:
        """Runs a step of every shape that there can be, where a new shape costs a compilation; where decode steps are
        captured, one of each size; and a few steps where the model is compiled for any size.

        They read block 0 and write nothing. The shapes within the sampler depend on what requests ask for; a batch that
        asks for nothing is run.
        """
        shapes: ShapePolicy = call_checked(self._platform, "shapes", returns=ShapePolicy)
        max_rows = self._config.scheduler.max_num_seqs
        if self._platform.capabilities.static_shapes:
            self._run_all_shapes(shapes)
        elif self._is_compiled and self._platform.capabilities.graphs and shapes.requests is not None:
            self._run_models(decode_shapes(shapes, max_rows=max_rows))
        elif self._is_compiled and self._compiler_needs_warm_up:
            limits = {"max_tokens": self._config.scheduler.max_num_batched_tokens, "max_pages": self.rows.max_pages}
            begun = time.monotonic()
            self._run_models(dynamic_compile_shapes(shapes, **limits, max_rows=max_rows, block_size=self._block_size))
            self._runtime.synchronize()
            logger.info("The model was compiled for steps of any size in %.1f s.", time.monotonic() - begun)
        self._runtime.end_warm_up()

    def _run_models(self, shapes: Iterable[StepShape]) -> None:
        """The model alone, for steps of these shapes."""
        for shape in shapes:
            inputs = dummy_inputs(
                shape.num_tokens,
                shape.num_requests,
                padded_tokens=shape.tokens,
                padded_requests=shape.requests,
                pages=shape.pages,
                block_size=self._block_size,
                runtime=self._runtime,
                with_prompt_lens=self.model.uses_prompt_lens,
                num_groups=len(self._attention.groups),
            )
            self._forward(inputs, self._pipeline.zero_hidden_states(len(inputs.token_ids)))
            self._runtime.step_mark()

    def _run_all_shapes(self, shapes: ShapePolicy) -> None:
        """Steps of every shape; then every kind of sampling, for each number of requests."""
        scheduler, block_size = self._config.scheduler, self._block_size
        limits = {"max_tokens": scheduler.max_num_batched_tokens, "max_rows": scheduler.max_num_seqs}
        states_by_size: dict[int, torch.Tensor] = {}
        for shape in step_shapes(shapes, **limits, max_pages=self.rows.max_pages, block_size=block_size):
            inputs = dummy_inputs(
                min(
                    shape.num_tokens, shape.num_requests * self._config.model.max_model_len
                ),  # no request has more positions
                shape.num_requests,
                padded_tokens=shape.tokens,
                padded_requests=shape.requests,
                pages=shape.pages,
                block_size=block_size,
                runtime=self._runtime,
                with_prompt_lens=self.model.uses_prompt_lens,
                with_sample_rows=self._sampled_token_buffer is not None,
                num_groups=len(self._attention.groups),
            )
            if self._sampled_token_buffer is not None:
                inputs.token_ids = self._sampled_token_buffer.replace_placeholders(inputs.token_ids)
            _, states = self._compute(inputs, self._pipeline.zero_hidden_states(shape.tokens))
            if states is not None:
                states_by_size[shape.requests] = states
        for size, states in states_by_size.items():
            num_rows = min(size, scheduler.max_num_seqs)
            for params in warm_up_params(self._config.model.vocab_size):
                state, history = self._dummy_sampling_rows(num_rows, [params])
                sampled = self._sampler.sample(self._logits(states, num_rows), np.arange(num_rows), state, history)
                if self._sampled_token_buffer is not None:
                    spare = np.full(size, scheduler.max_num_seqs, dtype=np.int32)
                    self._sampled_token_buffer.store(sampled, self._runtime.from_numpy(spare))
                sampled.send_to_host(self._runtime.to_host)
                sampled.numpy()
                self._runtime.step_mark()

    def _device_counts(self, max_rows: int) -> DeviceTokenCounts:
        """Counts of tokens, for penalties, where tokens stay on the device."""
        model = self._config.model
        return DeviceTokenCounts(self._runtime.empty, max_rows, model.vocab_size, model.max_model_len)

    def _dummy_sampling_rows(
        self, num_rows: int, params: list[SamplingParams], counts: DeviceTokenCounts | None = None
    ) -> tuple[SamplingState, TokenHistory]:
        """Rows that ask for these, and greedy ones after them."""
        state = SamplingState(num_rows, self._config.model.vocab_size, 0, device_counts=counts)
        history = TokenHistory(num_rows, 2)
        for row in range(num_rows):
            history.set_row(row, [0], 1)
            wanted = params[row] if row < len(params) else SamplingParams(temperature=0.0)
            state.set_row(row, wanted, eos_token_ids=[], request_id="warm-up", num_prompt_tokens=1)
        return state, history

    def _profile_sampling(self, logits: torch.Tensor) -> None:
        """Samples from every row in the way that takes most memory."""
        num_rows = logits.shape[0]
        params = SamplingParams(top_p=0.5, repetition_penalty=1.5, logprobs=0)
        # As steps will: where none may wait for the device, a whole batch goes through the filters at a time, and there
        # is a table of counts.
        on_device = keeps_sampled_tokens_on_device(self._config, self._platform.capabilities)
        counts = self._device_counts(num_rows) if on_device else None
        state, history = self._dummy_sampling_rows(num_rows, [params] * num_rows, counts)
        sampler = self._make_sampler()
        sampler.may_synchronize &= not on_device
        sampler.sample(logits, np.arange(num_rows), state, history)

    def _logits_processors(self) -> LogitsProcessorSet | None:
        """Those that the settings name, where tokens are sampled."""
        names = self._config.logits_processors
        if not names or not self._pipeline.is_last:
            return None
        max_rows, vocab_size = self._config.scheduler.max_num_seqs, self._config.model.vocab_size
        return LogitsProcessorSet(names, LogitsProcessorContext(vocab_size, max_rows, self._runtime.device))

    def _compute(
        self, inputs: StepInputs, intermediate: torch.Tensor | None, adapters: LoRAMapping | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the model.

        Returns:
            [T, hidden_size], what it gives for every token; and on the last stage [L, hidden_size], of the lines whose
            logits are wanted, or None for none. Both are computed when the device is ready: what follows is a program
            of its own, which depends on neither T nor the pages.
        """
        hidden, states = self._forward(inputs, intermediate, adapters), None
        if self._pipeline.is_last and self._config.model.kind.generates:
            if self._static:
                states = hidden.index_select(0, inputs.logits_indices)
            elif len(inputs.sampling):
                everything = int(inputs.num_logits_rows.sum()) == len(inputs.logits_indices) == hidden.shape[0]
                states = hidden if everything else hidden.index_select(0, inputs.logits_indices)
        self._runtime.step_mark()
        return hidden, states

    def _forward(
        self, inputs: StepInputs, intermediate: torch.Tensor | None, adapters: LoRAMapping | None = None
    ) -> torch.Tensor:
        if self._config.model.kind.is_encoder:
            return self._encode(inputs, intermediate)
        plans = [backend.build_metadata(inputs.layouts[group]) for backend, group in self._attention_groups.values()]
        arguments = (inputs.token_ids, inputs.positions, inputs.prompt_lens, intermediate, *plans)
        if adapters is None:
            return self._run_model(*arguments)
        # Not compiled, and not replayed: which tokens have which adapter is another shape in every step.
        with self.lora_manager.step.active(adapters):
            return self._call_model(*arguments)

    def _lora_batch_of(self, inputs: StepInputs) -> LoRAMapping | None:
        """The adapters of a step's requests; None where none has one."""
        if not self._models.supports_lora:
            return None
        ids = self.rows.lora_ids[inputs.rows]
        return self.lora_manager.prepare_batch(ids, inputs.num_scheduled, len(inputs.token_ids)) if ids.any() else None

    def _encode(self, inputs: StepInputs, intermediate: torch.Tensor | None) -> torch.Tensor:
        """As `_forward`, of a model without a cache. Where prompts begin differs in every step: nothing to compile."""
        starts, token_types = inputs.layout.query_start_loc.tolist(), None
        if self.model.uses_token_types:
            types = make_token_type_ids(
                self.rows.pooling,
                rows=inputs.rows.tolist(),
                starts=starts,
                firsts=inputs.first_positions.tolist(),
                num_tokens=len(inputs.token_ids),
            )
            token_types = None if types is None else self._runtime.from_numpy(types)
        step = ForwardStep({}, prompt_starts=starts, token_types=token_types)
        hidden: torch.Tensor = self.model(inputs.token_ids, inputs.positions, step, intermediate)
        return hidden

    def _call_model(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        prompt_lens: torch.Tensor | None,
        intermediate: torch.Tensor | None,
        *plans: AttentionMetadata,
    ) -> torch.Tensor:
        """The model with a step's metadata laid out as arguments, as in `_plans`: the function that is compiled."""
        step = ForwardStep(dict(zip(self._attention_groups, plans, strict=True)), prompt_lens)
        hidden: torch.Tensor = self.model(token_ids, positions, step, intermediate)
        return hidden

    @property
    def _static(self) -> bool:
        return self._platform.capabilities.static_shapes

    @property
    def _is_compiled(self) -> bool:
        config = self._config
        return self._platform.capabilities.compile and not config.enforce_eager and not config.model.kind.is_encoder

    def _compile_models(self) -> None:
        """Gives the models to the platform's compiler, where it has one. Once the KV cache is there to stay."""
        if self._config.model.kind.is_encoder:
            return
        self._run_model = self._compiled(self._call_model)
        speculative = self._config.speculative
        if speculative is not None and self._pipeline.is_last:
            self._proposer = self._make_proposer(speculative)

    def _compiled(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The same, faster where the platform can make it so."""
        if not self._is_compiled:
            return function
        compiler: CompileBackend = call_checked(self._platform, "compiler", returns=CompileBackend)
        self._compiler_needs_warm_up = compiler.needs_warm_up()
        return compiler.compile(function, dynamic=True)

    def _make_proposer(self, config: SpeculativeConfig) -> Proposer:
        draft = self._models.draft
        if draft is None:
            return NgramProposer(
                self.rows.history,
                num_tokens=config.num_speculative_tokens,
                shortest=config.prompt_lookup_min,
                longest=config.prompt_lookup_max,
            )
        scheduler = self._config.scheduler
        return DraftModelProposer(
            draft,
            self._config.model,
            rows=self.rows,
            block_size=self._block_size,
            inputs=StepInputBuilder(
                self.rows,
                block_size=self._block_size,
                max_tokens=scheduler.max_num_batched_tokens + scheduler.max_num_seqs,
                max_rows=scheduler.max_num_seqs,
                runtime=self._runtime,
                shapes=call_checked(self._platform, "shapes", returns=ShapePolicy),
                with_prompt_lens=draft.model.uses_prompt_lens,
            ),
            plans=self._attention.attention_groups_of(draft.layers),
            sampler=self._make_sampler(),
            num_tokens=config.num_speculative_tokens,
            compile=self._compiled,
        )

    def _sample_last_stage(
        self, plan: SchedulerOutput, inputs: StepInputs, hidden: torch.Tensor, states: torch.Tensor | None
    ) -> ModelRunnerOutput | None:
        """Turns hidden states into tokens and whatever else was asked for, and reads them unless that can wait."""
        result = StepResult(plan.step, inputs.rows, inputs.sampling, drafts=plan.draft_token_ids)
        if self.rows.prompt_logprobs:
            result.prompt_logprobs_chunks = self._prompt_logprobs.compute(inputs, hidden, self.model.compute_logits)
        if self.rows.pooling.params:
            result.pooled = pool_step(
                self.rows.pooling,
                self._runtime,
                hidden,
                rows=inputs.rows.tolist(),
                starts=inputs.layout.query_start_loc.tolist(),
                firsts=inputs.first_positions.tolist(),
                prompt_lens=self.rows.history.num_prompt_tokens[inputs.rows].tolist(),
                scores=self.model.scores,
            )
        if len(inputs.sampling):
            masks = TokenMasks(plan.mask_rows, plan.token_masks) if plan.mask_rows else None
            assert states is not None
            result.sampled = self._sample(inputs, states, masks)
        if self._sampled_token_buffer is not None:
            self._sampled_token_buffer.add_step(result)
            return None
        output, tokens = result.read()
        further = {plan.rows[position]: more for position, more in output.further_token_ids.items()}
        self.rows.append_sampled_tokens(inputs.rows[inputs.sampling], tokens, further)
        if self._proposer is not None:
            output.draft_token_ids = self._propose_drafts(self._proposer, plan, inputs, output)
        if not self._pipeline.is_first:
            self._pipeline.send_output(output, any_sampled=len(tokens) > 0)
        return output

    def _propose_drafts(
        self, proposer: Proposer, plan: SchedulerOutput, inputs: StepInputs, output: ModelRunnerOutput
    ) -> dict[int, list[int]]:
        """Tokens that may come next, by position in the batch, for rows whose next ones can be checked ahead."""
        sampling = inputs.sampling
        # Grammars and logits processors have to see each token before they say what may follow.
        barred = (self.rows.sampling.flags[inputs.rows[sampling]] & PROCESSED).astype(bool)
        if plan.mask_rows or output.errors:
            barred |= np.isin(inputs.rows[sampling], plan.mask_rows) | np.isin(sampling, list(output.errors))
        at = sampling[~barred]
        others = np.delete(inputs.rows, at)
        drafts = proposer.propose(inputs.rows[at], others)
        return {position: tokens for position, tokens in zip(at.tolist(), drafts, strict=True) if tokens}

    def _sample(self, inputs: StepInputs, states: torch.Tensor, masks: TokenMasks | None) -> SamplerOutput:
        """Samples for the rows that have reached the end of their known tokens."""
        state, history = self.rows.sampling, self.rows.history
        rows, ends = inputs.rows[inputs.sampling], None
        if inputs.num_draft_tokens.any():
            ends = _counted(history.num_tokens[rows], inputs.num_logits_rows)
            rows = rows.repeat(inputs.num_logits_rows)
        logits = self._logits(states, len(rows))
        if self._sampled_token_buffer is not None and history.ends_in_placeholder(state.rows_reading_tokens(rows)):
            self._sampled_token_buffer.read_all_steps()  # while the device computes
        sampled = self._sampler.sample(logits, rows, state, history, masks=masks, ends=ends)
        del logits  # what is lazy and has a name is a result of the compiled step: another step than the warm-up's
        if self._sampled_token_buffer is not None:
            assert inputs.sample_rows is not None
            self._sampled_token_buffer.store(sampled, inputs.sample_rows)
            if state.device_counts is not None:
                state.device_counts.add(sampled.token_ids, inputs.sample_rows)
        else:
            sampled.send_to_host(self._runtime.to_host)
        return sampled

    def _logits(self, states: torch.Tensor, num_rows: int) -> torch.Tensor:
        """[num_rows, vocab], or, where shapes are static, with a line for each of `states`: the further are padding."""
        logits = self.model.compute_logits(states)
        return logits if self._static else logits[:num_rows]


def _raise_closed(*arguments: object) -> torch.Tensor:
    raise AssertionError("the worker was shut down")


def _counted(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int [sum of counts]: for each i, `counts[i]` numbers from `first[i]` on."""
    ends = counts.cumsum()
    return np.arange(ends[-1]) + (first - ends + counts).repeat(counts)
