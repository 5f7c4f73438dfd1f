"""Offline inference: `LLM` loads a model and generates text, embeddings or scores from lists of prompts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import msgspec

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_keywords import EngineKeywords, with_every_setting
from mvllm.engine.adapters import EngineAdapters
from mvllm.engine.engine_methods import AddedMethods
from mvllm.engine.forward import forward
from mvllm.engine.frontend.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput, failure_of
from mvllm.engine.frontend.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PooledRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from mvllm.engine.frontend.requested_config import requested_config
from mvllm.engine.frontend.scoring import ScoringInput, ScoringRequests
from mvllm.engine.llm_engine import LLMEngine
from mvllm.engine.metrics.profiler import Profiler
from mvllm.engine.rollouts import EngineRollouts
from mvllm.entrypoints.chat_prompt import chat_prompt
from mvllm.entrypoints.chat_template import Conversation, is_conversation
from mvllm.entrypoints.finished_outputs import finished_outputs, raise_failures
from mvllm.entrypoints.pooling_tasks import PoolingArgument, for_named_task, for_one_vector, for_task
from mvllm.entrypoints.prompt_lists import as_prompt_list, one_per_prompt
from mvllm.entrypoints.score_inputs import ContentInput, score_inputs
from mvllm.entrypoints.thinking_defaults import with_thinking_tags
from mvllm.errors import EngineDeadError, RequestError
from mvllm.logging import configure_logging
from mvllm.messages.beam_search_params import BeamSearchParams
from mvllm.messages.field_checks import describe_value
from mvllm.messages.inputs import PromptType
from mvllm.messages.lora import LoRARequest
from mvllm.messages.pooling_params import PoolingParams, PoolingTask
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from mvllm.config.engine_config import EngineConfig
    from mvllm.config.model import ModelConfig
    from mvllm.engine.metrics.reader import Metric

_T = TypeVar("_T")
_Pooled = TypeVar("_Pooled", bound=PooledRequestOutput[Any])

UseTqdm = bool | Callable[..., Any]
ParamsArgument = SamplingParams | Sequence[SamplingParams] | None
LoRAArgument = LoRARequest | Sequence[LoRARequest | None] | None


def _rollouts(llm: LLM) -> EngineRollouts:
    return llm.llm_engine.rollouts


def _adapters(llm: LLM) -> EngineAdapters:
    return llm.llm_engine.adapters


class LLM(AddedMethods):
    """A loaded model for offline inference.

    The model's memory is freed by `close()`, or at the end of a `with` block.

    Thread-safe: methods may be called in several threads at once. Their requests run in the same batches, and an error
    in one call does not affect the others. What changes the engine as a whole (`sleep`, weight updates, `close`, ...)
    runs between two steps, in the order of the calls; calls that wait for outputs then wait on, or raise an error if
    their requests were dropped.

    Args:
        model: Model folder, GGUF file, hub name, or `demo`.
        kwargs: Settings by name, those of EngineArgs; see the page of engine settings for what each does. Keywords of
            other engines are translated or dropped with a warning if `mvllm-compat` is installed.

    Raises:
        ConfigError: A setting is unknown or invalid; the message names the nearest setting or the allowed values.
        ModelError: The model or its tokenizer cannot be loaded.
        PlatformError: No platform is available, or several are and none was chosen.
    """

    @with_every_setting
    def __init__(self, model: str | os.PathLike[str], **kwargs: Unpack[EngineKeywords]) -> None:
        configure_logging()  # before the settings are read, which may log warnings
        self._start(requested_config(EngineArgs.from_kwargs(model=model, **kwargs)))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLM:
        """Creates an LLM from complete engine arguments."""
        configure_logging()
        return cls._from_config(requested_config(args))

    @classmethod
    def _from_config(cls, config: EngineConfig) -> LLM:
        """Creates an LLM with a configuration, as `requested_config` makes it."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        self._request_ids = itertools.count()
        self._profiler = Profiler()
        self._model = config.model.model
        self._engine: LLMEngine | None = LLMEngine(config)

    def __repr__(self) -> str:
        engine = getattr(self, "_engine", None)
        if engine is None:
            return f"LLM({getattr(self, '_model', None)!r}, closed)"
        return repr(engine).replace(type(engine).__name__, type(self).__name__, 1)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine that runs the requests.

        Raises:
            EngineDeadError: `close()` was called.
        """
        if self._engine is None:
            raise EngineDeadError("This LLM has been closed; create a new one.")
        return self._engine

    def close(self) -> None:
        """Shuts the engine down and frees the model's memory. Idempotent.

        Calls in other threads that wait for outputs raise EngineDeadError.
        """
        engine, self._engine = getattr(self, "_engine", None), None
        if engine is not None:
            engine.shutdown()

    @property
    def model_config(self) -> ModelConfig:
        """The settings of the model, such as `max_model_len`."""
        return self.llm_engine.model_config

    def get_tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of the sampling parameters that `generate` uses by default, from the model's generation config."""
        return self.llm_engine.input_processor.default_params()

    def reset_prefix_cache(self) -> bool:
        """Drops all cached prefixes. Returns whether the cache was reset."""
        return self.llm_engine.reset_prefix_cache()

    def reset_mm_cache(self) -> bool:
        """Drops prepared images, audio and videos, and results of encoders. Returns whether none is left."""
        return self.llm_engine.reset_mm_cache()

    def sleep(self, level: int = 1) -> None:
        """Frees device memory. Requests are rejected until `wake_up`.

        Args:
            level: 1 frees the KV cache, and moves the weights to host memory if the device has a memory of its own;
                2 drops both, and `wake_up` reads the checkpoint again.

        Raises:
            RequestError: `level` is neither 1 nor 2, or the host has no memory for the weights.
            PlatformError: The platform's worker does not support sleep.
        """
        self.llm_engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocates the freed memory again. Requests are accepted once all of it is allocated.

        Args:
            tags: What to allocate: `weights`, `kv_cache` or both; all by default.

        Raises:
            RequestError: A tag is unknown, or `kv_cache` comes before `weights`.
            CacheError, ModelError: The memory or the checkpoint is not available. The call may be repeated.
        """
        self.llm_engine.wake_up(tags)

    pause_generation = forward(_rollouts, EngineRollouts.pause_generation)
    resume_generation = forward(_rollouts, EngineRollouts.resume_generation)
    is_paused = forward(_rollouts, EngineRollouts.is_paused)
    init_weight_transfer_engine = forward(_rollouts, EngineRollouts.init_weight_transfer_engine)
    start_weight_update = forward(_rollouts, EngineRollouts.start_weight_update)
    update_weights = forward(_rollouts, EngineRollouts.update_weights)
    finish_weight_update = forward(_rollouts, EngineRollouts.finish_weight_update)
    abandon_weight_update = forward(_rollouts, EngineRollouts.abandon_weight_update)
    weight_info = forward(_rollouts, EngineRollouts.weight_info)
    update_lora = forward(_adapters, EngineAdapters.update_lora)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, see `LLMEngine.collective_rpc`."""
        return self.llm_engine.collective_rpc(method, args, timeout, kwargs)

    def apply_model(self, func: Callable[[Any], _T]) -> list[_T]:
        """Calls a function with the model of every worker, see `LLMEngine.apply_model`."""
        return self.llm_engine.apply_model(func)

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics since its start; see `mvllm.engine.metrics.reader` for their types."""
        return self.llm_engine.read_metrics()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Starts recording the torch operations of this process, with one worker those of the engine.

        Args:
            profile_prefix: The first part of the trace's name.

        Raises:
            RequestError: The profiler is running.
            ConfigError: The engine computes in other processes, or the trace's folder cannot be created.
        """
        self.apply_model(lambda model: None)  # raises if the worker is not in this process
        self._profiler.start(profile_prefix)

    def stop_profile(self) -> Path:
        """Stops recording, and writes a trace to the folder MVLLM_TORCH_PROFILER_DIR; returns its path.

        Raises:
            RequestError: The profiler is not running.
        """
        return self._profiler.stop()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: ParamsArgument = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRAArgument = None,
        raise_on_error: bool = True,
    ) -> list[RequestOutput]:
        """Generates text from each prompt.

        Args:
            prompts: A prompt or a list of prompts. A prompt is a text, a list of token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`; a list of ints is one prompt of token ids.
            sampling_params: For all prompts, or one per prompt; None uses the model's defaults.
            use_tqdm: Show a progress bar; a function replaces `tqdm.tqdm`.
            priority: For all prompts, or one per prompt; lower values are scheduled first.
            lora_request: The adapter for all prompts, or one (or None) per prompt; needs `enable_lora`.
            raise_on_error: Raise an error at the end if a prompt failed while it was processed, such as for a schema
                that cannot be enforced, or logits that are NaN. The others run to their end first, and the error's
                `outputs` has all of them. If False, they are returned. The output of a failed prompt has the finish
                reason `error` and an `error`.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            RequestError: A prompt, parameter or adapter is invalid, and no prompt was processed.
            RequestFailedError: See `raise_on_error`.
            EngineDeadError: The engine has failed or was closed.
        """
        engine, each = self.llm_engine, as_prompt_list(prompts)
        return self._generate(engine, each, sampling_params, use_tqdm, priority, lora_request, raise_on_error)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsArgument = None,
        *,
        use_tqdm: UseTqdm = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRAArgument = None,
        raise_on_error: bool = True,
    ) -> list[RequestOutput]:
        """Generates the next message of each conversation.

        Args:
            messages: A conversation, which is a list of `{"role": ..., "content": ...}`, or a list of conversations. A
                content is a text, or a list of parts as in the chat completions API (`text`, `image_url`,
                `input_audio`, `video_url`, and `image_pil` with an image of Pillow).
            sampling_params, use_tqdm, priority, lora_request, raise_on_error: As for `generate`.
            chat_template: A Jinja template in place of the tokenizer's own.
            add_generation_prompt: End the prompt with the header of an assistant message.
            continue_final_message: Continue the last message; needs `add_generation_prompt=False`.
            tools: Functions that the model may call, as JSON schemas.
            chat_template_kwargs: Additional variables of the template.
            mm_processor_kwargs: Arguments of the model's processor of images, audio and videos.

        Returns:
            One output per conversation, in order.

        Raises:
            RequestError: A conversation is invalid, or the model has no chat template, and no conversation was
                processed.
            RequestFailedError: See `raise_on_error`.
        """
        engine = self.llm_engine
        if not isinstance(messages, list | tuple) or not messages:
            raise RequestError(
                "messages must be a conversation, which is a list of messages, or a list of conversations.",
                parameter="messages",
            )
        conversations = [messages] if is_conversation(messages) else messages
        prompts: list[PromptType] = [
            chat_prompt(
                engine.config,
                engine.tokenizer,
                cast(Conversation, conversation),
                item_client=engine.item_client,
                mm_processor_kwargs=mm_processor_kwargs,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._generate(engine, prompts, sampling_params, use_tqdm, priority, lora_request, raise_on_error)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: UseTqdm = False,
        priority: int | Sequence[int] | None = None,
        raise_on_error: bool = True,
    ) -> list[BeamSearchOutput]:
        """Searches the most probable continuations of each prompt with beam search.

        Args:
            prompts, use_tqdm, priority, raise_on_error: As for `generate`.
            params: The same for all prompts.

        Returns:
            One output per prompt, in the order of the prompts, with up to `beam_width` sequences, best first.

        Raises:
            RequestError: A prompt or parameter is invalid.
            RequestFailedError: A search failed, for instance because no sequence can end, see `raise_on_error`.
            EngineDeadError: The engine has failed or was closed.
        """
        engine = self.llm_engine
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams; found {describe_value(params)}.", parameter="params")
        settings = params.as_sampling_params()
        settings.detokenize = engine.has_tokenizer
        each = as_prompt_list(prompts)
        outputs = self._generate(engine, each, settings, use_tqdm, priority, raise_on_error=False)
        found = [_as_beam_search_output(output, settings.length_penalty) for output in outputs]
        if raise_on_error:
            raise_failures(found, map(failure_of, outputs))
        return found

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingArgument = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        pooling_task: str | None = None,
        raise_on_error: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Pools the last hidden states of each prompt to an embedding, or to class scores if the model classifies.

        Args:
            prompts: As for `generate`; a prompt may be as long as `max_model_len`.
            pooling_params: For all prompts, or one per prompt; None uses the model's defaults.
            use_tqdm, priority: As for `generate`.
            pooling_task: `embed`, `classify`, or `token_embed` for a vector of each token; by default the model's
                task, or that of `pooling_params`.
            raise_on_error: As for `generate`; a prompt fails if its vector has NaN or infinity. Its output is empty and
                has an `error`.

        Returns:
            One output per prompt, in the order of the prompts; its `outputs.data` is the pooled vector, float32.

        Raises:
            RequestError: A prompt or parameter is invalid. No prompt was processed.
            RequestFailedError: See `raise_on_error`.
            EngineDeadError: The engine has failed or was closed.
        """
        engine = self.llm_engine
        each = as_prompt_list(prompts)
        if not each:
            return []
        if pooling_task is not None:
            pooling_params = for_named_task(pooling_params, pooling_task)
        requests = engine.pooling_input_processor.process_batch(
            [str(next(self._request_ids)) for _ in each],
            each,
            one_per_prompt(pooling_params, len(each), "pooling_params"),
            priorities=None if priority is None else one_per_prompt(priority, len(each), "priority"),
        )
        finished = finished_outputs(engine, requests, use_tqdm)
        return _raised(list(map(PoolingRequestOutput.with_error, finished)), raise_on_error)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingArgument = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        raise_on_error: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds each prompt. As `encode`, but each output's `outputs.embedding` is a list of floats.

        Raises:
            RequestError: As `encode`; the model is a classifier; or an embedding of each token is requested, which
                only `encode` supports.
        """
        asked = for_one_vector(pooling_params)
        encoded = self.encode(prompts, asked, use_tqdm=use_tqdm, priority=priority, raise_on_error=False)
        return _raised(list(map(EmbeddingRequestOutput.from_base, encoded)), raise_on_error)

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingArgument = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        raise_on_error: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """Classifies each prompt with a model that has a classification head (`...ForSequenceClassification`).

        Args:
            prompts, use_tqdm, priority, raise_on_error: As for `encode`.
            pooling_params: For all prompts, or one per prompt; `use_activation=False` returns logits.

        Returns:
            One output per prompt, in the order of the prompts; its `outputs.probs` has one value per label.

        Raises:
            RequestError: As `encode`; or the model is not a classifier.
            RequestFailedError, EngineDeadError: As `encode`.
        """
        asked = for_task(pooling_params, PoolingTask.CLASSIFY)
        encoded = self.encode(prompts, asked, use_tqdm=use_tqdm, priority=priority, raise_on_error=False)
        return _raised(list(map(ClassificationRequestOutput.from_base, encoded)), raise_on_error)

    def reward(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingArgument = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        raise_on_error: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Rewards of each prompt by a reward model, which is a classifier: `outputs.data` has one value per label.

        Args:
            prompts, use_tqdm, priority, raise_on_error: As for `encode`.
            pooling_params: For all prompts, or one per prompt; by default rewards are logits (`use_activation=False`).

        Raises:
            RequestError, RequestFailedError, EngineDeadError: As `classify`.
        """
        asked = for_task(pooling_params or PoolingParams(use_activation=False), PoolingTask.CLASSIFY)
        return self.encode(prompts, asked, use_tqdm=use_tqdm, priority=priority, raise_on_error=raise_on_error)

    def score(
        self,
        data_1: ScoringInput | ContentInput | Sequence[ScoringInput | ContentInput],
        data_2: ScoringInput | ContentInput | Sequence[ScoringInput | ContentInput],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: UseTqdm = True,
        raise_on_error: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Scores the similarity of pairs of texts, or of prompts with images.

        A cross-encoder (a classifier with one label) scores each pair. With other models the score is the cosine
        similarity of the two embeddings; with a vector for each token (a model for late interaction, or the pooling
        type `all`) it is MaxSim: for each token of the first the largest dot product with one of the second, summed up.

        Args:
            data_1: One input, or one for each input of `data_2`. An input is a text, a prompt dict as for `generate`,
                or `{"content": parts}` with parts of the chat completions API.
            data_2: One input or several.
            pooling_params: For all inputs.
            use_tqdm, raise_on_error: As for `encode`; the score of a failed pair is NaN.

        Returns:
            One output per input of `data_2`, in order, with the score in `outputs.score`.

        Raises:
            RequestError: An input or parameter is invalid, or the classifier has several labels.
            RequestFailedError, EngineDeadError: As `encode`.
        """
        engine = self.llm_engine
        if pooling_params is not None and not isinstance(pooling_params, PoolingParams):
            raise RequestError("pooling_params must be PoolingParams.", parameter="pooling_params")
        first, second = (score_inputs(data, name, engine) for name, data in (("data_1", data_1), ("data_2", data_2)))
        scoring = ScoringRequests.from_inputs(
            engine.pooling_input_processor, first, second, pooling_params or PoolingParams()
        )
        answers = self.encode(scoring.prompts, scoring.params, use_tqdm=use_tqdm, raise_on_error=False)
        return _raised(scoring.outputs(answers), raise_on_error)

    def _generate(
        self,
        engine: LLMEngine,
        prompts: Sequence[PromptType],
        params: ParamsArgument,
        use_tqdm: UseTqdm,
        priority: int | Sequence[int] | None,
        lora_request: LoRAArgument = None,
        raise_on_error: bool = True,
    ) -> list[RequestOutput]:
        """Validates all prompts and parameters, then generates."""
        if not prompts:
            return []
        ids = [str(next(self._request_ids)) for _ in prompts]
        chosen = engine.input_processor.default_params() if params is None else params
        requests = engine.input_processor.process_batch(
            ids,
            prompts,
            _final_only(one_per_prompt(chosen, len(prompts), "sampling_params"), engine),
            priorities=None if priority is None else one_per_prompt(priority, len(prompts), "priority"),
            lora_requests=None if lora_request is None else one_per_prompt(lora_request, len(prompts), "lora_request"),
        )
        return finished_outputs(engine, requests, use_tqdm, raise_on_error)


def _raised(outputs: list[_Pooled], raise_on_error: bool) -> list[_Pooled]:
    """The outputs; with `raise_on_error` the error of the first that failed is raised instead."""
    if raise_on_error:
        raise_failures(outputs, (None if o.error is None else (o.error, o.error_parameter) for o in outputs))
    return outputs


def _as_beam_search_output(output: RequestOutput, length_penalty: float) -> BeamSearchOutput:
    sequences = []
    for found in output.outputs:
        cum_logprob = found.cumulative_logprob or 0.0
        sequences.append(
            BeamSearchSequence(
                tokens=[*output.prompt_token_ids, *found.token_ids],
                num_prompt_tokens=len(output.prompt_token_ids),
                text=found.text,
                cum_logprob=cum_logprob,
                score=cum_logprob / max(len(found.token_ids), 1) ** length_penalty,
                logprobs=found.logprobs,
                finish_reason=found.finish_reason,
                stop_reason=found.stop_reason,
                error=found.error,
            )
        )
    return BeamSearchOutput(sequences)


def _final_only(params: Sequence[Any], engine: LLMEngine) -> list[Any]:
    """Copies that request final outputs only, and have the tags of the model's thoughts if they limit them. Parameters
    that several prompts share are copied once."""
    copies: dict[int, Any] = {}
    for each in params:
        if id(each) not in copies:
            is_params = isinstance(each, SamplingParams)  # the input processor rejects other types
            final = RequestOutputKind.FINAL_ONLY
            copies[id(each)] = (
                with_thinking_tags(msgspec.structs.replace(each, output_kind=final), engine.config.model)
                if is_params
                else each
            )
    return [copies[id(each)] for each in params]
