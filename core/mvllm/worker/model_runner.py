"""Runs the model: the one place where a plan of integers becomes tensors, and tensors become tokens.

`execute_model` is the whole story: bring the rows up to the plan, build the inputs, run the model, sample where a row
has reached the end of its known tokens, remember the samples. It is the same for every platform; what differs comes in
through the runtime, the attention backends and the op providers.

Tensor parallel: all ranks of a group see the same logits, bit for bit (each band is computed once and copied to all),
draw with the same numbers, and so sample the same tokens; nothing has to be told. Pipeline parallel: the last stage
samples, and `Pipeline` tells the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from mvllm.config.engine_config import EngineConfig
from mvllm.distributed.group import GroupCoordinator
from mvllm.errors import CacheError, ModelError, MvllmError
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.messages.requests import PositionLogprobs
from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.models.registry import resolve_model_class
from mvllm.models.weights import load_weights
from mvllm.ops.dtypes import torch_dtype
from mvllm.ops.registry import OpTable
from mvllm.platform.ask import ask, ask_attention_backend
from mvllm.platform.attention import AttentionBackend, AttentionSpec
from mvllm.platform.interface import Platform
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.shapes import ShapePolicy
from mvllm.platform.worker_protocol import KVCacheNeeds
from mvllm.sampling.logprobs import prompt_logprobs
from mvllm.sampling.sampler import Sampler
from mvllm.sampling.state import SamplingState, TokenHistory
from mvllm.worker.pipeline import Pipeline
from mvllm.worker.rows import RowTable
from mvllm.worker.step_inputs import StepInputBuilder, StepInputs, profile_inputs

if TYPE_CHECKING:
    from mvllm.layers.attention import Attention

_PROMPT_LOGPROB_CHUNK = 256
"""Prompt positions whose logits exist at one time: [256, vocabulary] rather than [prompt, vocabulary]."""


class ModelRunner:
    """One rank's model, its KV cache and its rows.

    Args:
        config: The engine's configuration.
        platform: Gives attention backends, op providers and buckets.
        runtime: The bound device.
        tp, pp: The rank's tensor-parallel and pipeline-parallel groups.
        every_rank_answers: As in WorkerContext.
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
    ) -> None:
        self._config = config
        self._platform = platform
        self._runtime = runtime
        self._tp, self._pp = tp, pp
        self._backends: dict[AttentionSpec, AttentionBackend] = {}
        self._layers: list[Attention] = []
        self._sampler = Sampler()
        self._pipeline = Pipeline(
            pp,
            runtime,
            hidden_size=config.model.hidden_size,
            dtype=torch_dtype(config.model.dtype),
            every_rank_answers=every_rank_answers,
        )

    def load_model(self) -> None:
        """Builds the model on the device and loads this rank's weights."""
        config = self._config.model
        dtype = torch_dtype(config.dtype)
        kv_dtype = config.dtype if self._config.cache.dtype == "auto" else self._config.cache.dtype
        context = BuildContext(
            dtype=dtype,
            device=self._runtime.device,
            ops=OpTable.resolve(ask(self._platform, "ops", returns=Sequence)),
            attention=self._backend_for,
            tp=self._tp,
            pp=self._pp,
            kv_dtype=kv_dtype,
        )
        model_class = resolve_model_class(config.architecture)
        with _out_of_memory_as(ModelError, f"The weights of {config.model}, whose sizes config.json gives,"):
            self.model = model_class(config, context)
        load_weights(
            self.model,
            config.path,
            load_format=self._config.load.load_format,
            use_tqdm=self._config.load.use_tqdm,
            seed=config.seed,
        )
        self.model.after_load()
        self.model.eval()
        self._layers = self.model.attention_layers()

    def kv_cache_needs(self) -> KVCacheNeeds:
        """What one token costs over all layers, and the block sizes that all backends accept.

        Raises:
            CacheError: The backends have no block size in common.
        """
        layouts = [layer.backend.kv_layout() for layer in self._layers]
        common = [size for size in layouts[0].block_sizes if all(size in layout.block_sizes for layout in layouts)]
        if not common:
            offers = "; ".join(sorted({str(layout.block_sizes) for layout in layouts}))
            raise CacheError(f"The attention backends of this model accept no common block size: {offers}.")
        return KVCacheNeeds(sum(layout.bytes_per_token for layout in layouts), tuple(common))

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Claims the KV cache of every layer and readies the rows."""
        self._allocate_layers(num_blocks, block_size)
        scheduler, model = self._config.scheduler, self._config.model
        state = SamplingState(scheduler.max_num_seqs, model.vocab_size, model.seed)
        self.rows = RowTable(scheduler.max_num_seqs, model.max_model_len, block_size, state)
        self._inputs = StepInputBuilder(
            self.rows,
            block_size=block_size,
            max_tokens=scheduler.max_num_batched_tokens,
            max_rows=scheduler.max_num_seqs,
            runtime=self._runtime,
            shapes=ask(self._platform, "shapes", returns=ShapePolicy),
            with_prompt_lens=self.model.uses_prompt_lens,
        )

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step. On a pipeline stage but the last, the output has no tokens."""
        self._pipeline.catch_up(plan, self.rows)
        self.rows.apply(plan)
        output = ModelRunnerOutput(step=plan.step)
        if not plan.rows:
            self._pipeline.skip(plan.step)
            return output
        inputs = self._inputs.build(plan)
        hidden = self._forward(inputs, self._pipeline.receive_hidden(len(inputs.token_ids)))
        if self._pipeline.is_last:
            self._finish_last_stage(inputs, hidden, output)
        else:
            self._pipeline.send_hidden(hidden)
            self._pipeline.expect(plan.step, inputs.rows, inputs.sampling)
        self.rows.num_computed[inputs.rows] += inputs.num_scheduled
        self._runtime.step_mark()
        return output

    def collect_output(self, step: int) -> ModelRunnerOutput:
        """On a pipeline stage but the last: what the last one made of `step`."""
        return self._pipeline.collect(step, self.rows)

    @torch.inference_mode()
    def profile(self) -> None:
        """Runs the largest step that the limits allow, on a one-block KV cache that it does not write.

        The caller reads the runtime's peak memory before and after. The cache is dropped again at the end.
        """
        block_size = self.kv_cache_needs().block_sizes[0]
        self._allocate_layers(1, block_size)
        scheduler = self._config.scheduler
        inputs = profile_inputs(
            max_tokens=scheduler.max_num_batched_tokens,
            max_rows=scheduler.max_num_seqs,
            max_model_len=self._config.model.max_model_len,
            block_size=block_size,
            runtime=self._runtime,
            shapes=ask(self._platform, "shapes", returns=ShapePolicy),
        )
        hidden = self._forward(inputs, self._pipeline.placeholder(len(inputs.token_ids)))
        if self._pipeline.is_last:
            self._profile_sampling(self.model.compute_logits(hidden.index_select(0, inputs.logits_at)))
        self._runtime.synchronize()
        for layer in self._layers:
            layer.kv_cache = None

    def _profile_sampling(self, logits: torch.Tensor) -> None:
        """Samples from every row in the way that takes most memory."""
        num_rows, vocab_size = logits.shape
        state, history = SamplingState(num_rows, vocab_size, 0), TokenHistory(num_rows, 2)
        params = SamplingParams(top_p=0.5, repetition_penalty=1.5, logprobs=0)
        for row in range(num_rows):
            history.set_row(row, [0], 1)
            state.set_row(row, params, eos_token_ids=[], request_id="profile", num_prompt_tokens=1)
        self._sampler.sample(logits, np.arange(num_rows), state, history)

    def _backend_for(self, spec: AttentionSpec) -> AttentionBackend:
        if spec not in self._backends:
            self._backends[spec] = ask_attention_backend(self._platform, spec)
        return self._backends[spec]

    def _allocate_layers(self, num_blocks: int, block_size: int) -> None:
        with _out_of_memory_as(CacheError, f"The KV cache of {num_blocks} blocks of {block_size} tokens"):
            for layer in self._layers:
                layer.kv_cache = layer.backend.allocate(num_blocks, block_size, self._runtime.device)

    def _forward(self, inputs: StepInputs, intermediate: torch.Tensor | None) -> torch.Tensor:
        metadata = {spec: backend.build_metadata(inputs.layout) for spec, backend in self._backends.items()}
        step = ForwardStep(metadata, inputs.prompt_lens)
        hidden: torch.Tensor = self.model(inputs.token_ids, inputs.positions, step, intermediate)
        return hidden

    def _finish_last_stage(self, inputs: StepInputs, hidden: torch.Tensor, output: ModelRunnerOutput) -> None:
        """Turns hidden states into tokens and whatever else was asked for."""
        if self.rows.prompt_logprobs:
            output.prompt_logprobs = self._prompt_logprobs(inputs, hidden)
        self._sample(inputs, hidden, output)
        if not self._pipeline.is_first:
            self._pipeline.send_back(output, any_sampled=len(inputs.sampling) > 0)

    def _sample(self, inputs: StepInputs, hidden: torch.Tensor, output: ModelRunnerOutput) -> None:
        """Samples for the rows that have reached the end of their known tokens, and appends the tokens to them."""
        tokens = np.full(len(inputs.rows), -1, dtype=np.int64)
        at = inputs.sampling
        if len(at):
            rows = inputs.rows[at]
            everything = len(at) == hidden.shape[0]
            logits = self.model.compute_logits(hidden if everything else hidden.index_select(0, inputs.logits_at))
            sampled = self._sampler.sample(logits[: len(at)], rows, self.rows.sampling, self.rows.history)
            tokens[at] = sampled.tolist()
            self.rows.history.append(rows, tokens[at])
            output.logprobs = {int(at[i]): entry for i, entry in sampled.logprobs.items()}
            output.errors = {int(at[i]): text for i, text in sampled.errors.items()}
        output.sampled_token_ids = tokens.tolist()

    def _prompt_logprobs(self, inputs: StepInputs, hidden: torch.Tensor) -> dict[int, list[PositionLogprobs]]:
        """Log-probabilities of the prompt tokens that this step's positions predict, for the rows that asked."""
        history, found = self.rows.history, {}
        starts = inputs.layout.query_start_loc
        for i, row in enumerate(inputs.rows.tolist()):
            wanted = self.rows.prompt_logprobs.get(row)
            first, prompt_len = int(inputs.first_positions[i]), int(history.num_prompt_tokens[row])
            last = min(first + int(inputs.num_scheduled[i]), prompt_len - 1)
            if wanted is None or first >= last:
                continue
            targets = torch.from_numpy(history.token_ids[row, first + 1 : last + 1].astype(np.int64))
            states = hidden[int(starts[i]) : int(starts[i]) + last - first]
            found[i] = [
                entry
                for chunk, ids in zip(
                    states.split(_PROMPT_LOGPROB_CHUNK), targets.split(_PROMPT_LOGPROB_CHUNK), strict=True
                )
                for entry in prompt_logprobs(self.model.compute_logits(chunk), self._runtime.to_device(ids), wanted)
            ]
        return found


@contextmanager
def _out_of_memory_as(kind: type[MvllmError], what: str) -> Iterator[None]:
    """Says in the user's terms that `what` found no memory: allocators raise RuntimeErrors of many wordings."""
    try:
        yield
    except MvllmError:
        raise
    except (MemoryError, RuntimeError) as e:
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise kind(f"{what} cannot be allocated on the device: {reason}") from e
