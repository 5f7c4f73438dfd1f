"""Checks a configuration against the capabilities of the platform.

A feature without its capability is switched off, with a log line, if the engine works without it; if the model or an
explicit setting needs it, the engine does not start. These checks run after the platform's `plan`, which may have
changed the same settings.
"""

from __future__ import annotations

from collections.abc import Iterator

from mvllm.config.engine_config import EngineConfig, replace_field
from mvllm.config.families import find_architecture
from mvllm.config.model import ModelConfig
from mvllm.config.model_implementations import implementation_name
from mvllm.engine.core.kv_connectors import check_connectors
from mvllm.errors import ConfigError
from mvllm.models.checkpoint_support import runs_natively
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.spec import ConfigChange


def required_config_changes(config: EngineConfig, capabilities: Capabilities, platform: str) -> Iterator[ConfigChange]:
    """The changes of settings that a platform's capabilities require.

    Args:
        platform: The platform's name, for errors.

    Raises:
        ConfigError: The model or an explicit setting needs a capability that the platform does not claim.
    """
    _check_model(config.model, capabilities, platform)
    _check_parallel(config, capabilities, platform)
    _check_lora(config, capabilities, platform)
    check_speculative(config, capabilities, platform)
    _check_batch_invariant(config, capabilities, platform)
    _check_kv_transfer(config, capabilities, platform)
    cache, scheduler = config.cache, config.scheduler
    if (
        (multimodal := config.model.multimodal) is not None
        and multimodal.by_transformers
        and runs_natively(config.model)
    ):
        config = replace_field(config, "model.multimodal", None)
        yield ConfigChange("model.multimodal", None, "the plugin's class of the architecture takes text alone")
    refusal = refusal_of_items(config, capabilities)
    if refusal is not None:
        yield ConfigChange("multimodal.refusal", refusal, "the platform or the settings do not allow it")
    if cache.enable_prefix_caching and not capabilities.prefix_caching:
        yield ConfigChange("cache.enable_prefix_caching", False, "the platform does not claim prefix_caching")
    if scheduler.enable_chunked_prefill and not capabilities.chunked_prefill:
        reason = "the platform does not claim chunked_prefill"
        yield ConfigChange("scheduler.enable_chunked_prefill", False, reason)
        if scheduler.max_num_batched_tokens < config.model.max_model_len:
            reason += ", so a step must hold the longest prompt"
            yield ConfigChange("scheduler.max_num_batched_tokens", config.model.max_model_len, reason)
    stored = config.model.dtype if cache.dtype == "auto" else cache.dtype
    if stored not in capabilities.kv_dtypes:
        offered = ", ".join(capabilities.kv_dtypes) or "nothing"
        if cache.dtype != "auto" or not capabilities.kv_dtypes:
            raise ConfigError(
                f"kv_cache_dtype {stored!r} was asked for, but the platform {platform!r} stores keys and values as "
                f"{offered}. Pass one of these, or 'auto'."
            )
        yield ConfigChange("cache.dtype", capabilities.kv_dtypes[0], f"the platform does not store {stored}")


def refusal_of_items(config: EngineConfig, capabilities: Capabilities) -> str | None:
    """Why requests cannot bring images, audio or embeddings, in one sentence; None if they can, or if none is possible.

    The model then takes text. Front ends read the sentence from `MultiModalConfig.refusal`.
    """
    if config.model.multimodal is None and not config.multimodal.enable_embeds:
        return None
    why = _why_no_items(config, capabilities)
    return None if why is None else f"Images, audio and embeddings are not supported here, because {why}."


def _why_no_items(config: EngineConfig, capabilities: Capabilities) -> str | None:
    model, through = config.model.multimodal, f"the model runs through {implementation_name(config.model.model_impl)}"
    if not capabilities.torch_device:
        return "the platform has its own worker, which takes token ids only"
    if config.model.kind.is_encoder:
        return "the model is a text encoder"
    if not runs_natively(config.model) and (model is None or not model.by_transformers):
        return f"{through}, where it takes token ids only"
    if model is None:
        return None
    graphs, static, sees_later = capabilities.graph_compiler, capabilities.static_shapes, model.spans_attend_both_ways
    cases = (
        (
            graphs and model.by_transformers,
            f"{through}, and the platform runs models as graphs",
        ),
        (
            graphs and sees_later,
            "the platform runs models as graphs, whose attention is causal, and the tokens of an image see later ones",
        ),
        (graphs and model.cross_attention, "the platform runs models as graphs, which have no cross-attention"),
        (
            static and model.by_transformers,
            f"{through}, and the platform compiles a program for every shape of its encoders",
        ),
        (
            static and model.cross_attention,
            "the platform compiles every shape, and lengths of cross-attention differ in each step",
        ),
        (
            static and sees_later,
            "the platform compiles every shape for causal attention, and the tokens of an image see later ones",
        ),
        (
            sees_later and not capabilities.non_causal_spans,
            "the platform does not claim non_causal_spans, and the tokens of an image attend to later ones",
        ),
        (
            model.cross_attention and config.parallel.pipeline_parallel_size > 1,
            "every layer of the model reads them, and pipeline_parallel_size is more than 1",
        ),
    )
    return next((why for is_so, why in cases if is_so), None)


def _check_parallel(config: EngineConfig, capabilities: Capabilities, platform: str) -> None:
    if not capabilities.torch_device or capabilities.devices_per_process != 1:
        return  # the platform connects its ranks itself
    needs = (
        ("tensor_parallel_size", config.parallel.tensor_parallel_size, ("all_reduce", "all_gather")),
        ("pipeline_parallel_size", config.parallel.pipeline_parallel_size, ("send_recv",)),
    )
    for setting, size, collectives in needs:
        missing = [name for name in collectives if name not in capabilities.collectives]
        if size > 1 and missing:
            raise ConfigError(
                f"{setting} is {size}, which needs the collectives {', '.join(missing)}, but the platform {platform!r} "
                f"does not claim them. Set {setting} to 1, or choose another platform."
            )


def _why_unsupported(capabilities: Capabilities, varying: str) -> str | None:
    """Why a platform cannot run a feature whose steps vary in shape, as `varying` describes; None if it can."""
    if not capabilities.torch_device:
        return "has its own worker"
    if capabilities.static_shapes:
        return f"compiles every shape, and {varying} in each step"
    return None


def _check_lora(config: EngineConfig, capabilities: Capabilities, platform: str) -> None:
    if config.lora is None:
        return
    why = _why_unsupported(capabilities, "the assignment of tokens to adapters differs")
    if why is not None:
        raise ConfigError(
            f"enable_lora is set, but LoRA is not supported on the platform {platform!r}, which {why}. Merge the "
            "adapter into the model's weights, or choose another platform."
        )


def check_speculative(config: EngineConfig, capabilities: Capabilities, platform: str) -> None:
    """Checks that the platform and the other settings allow the method of speculative decoding.

    Raises:
        ConfigError: They do not.
    """
    if config.speculative is None:
        return
    why = _why_unsupported(capabilities, "the number of draft tokens differs")
    if why is not None:
        raise ConfigError(
            f"speculative_config is set, but speculative decoding is not supported on the platform {platform!r}, which "
            f"{why}. Leave it out, or choose another platform."
        )
    if capabilities.graph_compiler and (config.speculative.reads_hidden or config.speculative.reads_layers):
        raise ConfigError(
            f"speculative_config: the method {config.speculative.method!r} reads hidden states of the model, which "
            f"the platform {platform!r} does not give: it runs models as graphs. Choose the method 'ngram' or a draft "
            "model."
        )
    if (draft := config.speculative.model) is not None:
        _check_model(draft, capabilities, platform, f"The draft model {draft.model}")
    _check_kept_layers(config)


def _check_kept_layers(config: EngineConfig) -> None:
    """Checks that the model keeps the hidden states which a method of speculative decoding reads."""
    speculative, model = config.speculative, config.model
    if speculative is None or not speculative.reads_layers:
        return
    reads = f"The method {speculative.method!r} of speculative_config reads hidden states between layers"
    if (size := config.parallel.pipeline_parallel_size) > 1:
        raise ConfigError(
            f"{reads}, which are on other pipeline stages: pipeline_parallel_size is {size}. Set it to 1, or choose "
            "another method."
        )
    if not runs_natively(model):
        raise ConfigError(
            f"{reads}, which the model does not give: it runs through {implementation_name(model.model_impl)}. Choose "
            "another method."
        )
    found = find_architecture(model.architecture)
    if found is not None and not found.keeps_layers:
        raise ConfigError(f"{reads}, which {model.architecture} does not give. Choose another method.")


def _check_kv_transfer(config: EngineConfig, capabilities: Capabilities, platform: str) -> None:
    if not config.kv_transfer.is_used:
        return
    settings = "kv_offloading_size, kv_disk_cache or kv_transfer_config is set"
    if not capabilities.kv_transfer:
        raise ConfigError(
            f"{settings}, but the platform {platform!r} does not claim kv_transfer: it does not copy blocks to host "
            "memory. Leave them out, or choose another platform."
        )
    if not config.cache.enable_prefix_caching or not capabilities.prefix_caching:
        raise ConfigError(
            f"{settings}, but prefixes are only found with enable_prefix_caching, which is off. Enable it (encoders "
            "and some platforms have no prefix caching), or leave them out."
        )
    if config.parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            f"{settings}, but with external_launcher every rank makes the same plans, which must not depend on when a "
            "block has been loaded. Leave them out, or use the executor 'mp'."
        )
    check_connectors(config.kv_transfer.connectors)


def _check_batch_invariant(config: EngineConfig, capabilities: Capabilities, platform: str) -> None:
    if not config.batch_invariant:
        return
    if not capabilities.batch_invariant:
        raise ConfigError(
            f"batch_invariant is set, but the platform {platform!r} does not claim this capability. Choose another "
            "platform, or leave batch_invariant out."
        )
    size = config.parallel.tensor_parallel_size
    conflicts = (
        (size > 1, f"tensor_parallel_size is {size}", "Ranks add up their parts of each layer. Set it to 1."),
        (config.lora is not None, "enable_lora is set", "Merge the adapter into the model's weights."),
        (
            config.model.logprobs_mode.startswith("processed"),
            f"logprobs_mode is {config.model.logprobs_mode!r}",
            "Use a mode that does not begin with 'processed'.",
        ),
        (config.model.kind.is_encoder, "the model is an encoder", "Leave batch_invariant out."),
    )
    for applies, setting, remedy in conflicts:
        if applies:
            raise ConfigError(f"batch_invariant is set and {setting}, which is not batch-invariant. {remedy}")


def _check_model(model: ModelConfig, capabilities: Capabilities, platform: str, draft: str | None = None) -> None:
    """Checks a model against the capabilities; `draft` is the name of a draft model in errors, None for the model."""
    name, remedy = draft or "The model", "Choose another platform"
    if draft is not None:
        remedy = "Choose another draft model, or another platform"
    if model.sliding_window is not None and not capabilities.sliding_window:
        if draft is None:
            remedy += (
                "; or, where max_model_len is no longer than the window, pass hf_overrides={'sliding_window': None}, "
                "which then gives the same results"
            )
        raise ConfigError(
            f"{name} has a sliding window of {model.sliding_window} tokens, but the platform {platform!r} does not "
            f"claim sliding_window. {remedy}."
        )
    largest = capabilities.max_head_size
    if largest is not None and model.head_size > largest:
        raise ConfigError(
            f"{name}'s attention heads have {model.head_size} elements, but the platform {platform!r} takes at most "
            f"{largest}. {remedy}."
        )
