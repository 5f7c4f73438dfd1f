"""The setting `speculative_config`: a JSON object whose keys depend on the method.

    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    {"model": "folder or hub name of a small model", "num_speculative_tokens": 4}
    {"method": "mtp"}
    {"method": "none"}

Core has the methods of this module. Other packages add methods by entry points of `mvllm.proposers`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from mvllm import plugin_groups
from mvllm.config.draft_method import (
    COMMON_KEYS,
    MAX_SPECULATIVE_TOKENS,
    BuildModel,
    DraftMethod,
    DraftSettings,
    ReadConfig,
    SpeculativeConfig,
)
from mvllm.config.model import ModelConfig
from mvllm.config.mtp import MTP, default_speculative_config, mtp_heads
from mvllm.config.tokenizer_vocabulary import first_difference
from mvllm.errors import ConfigError

NGRAM, DRAFT_MODEL = "ngram", "draft_model"
_NONE = "none"
_NGRAM_MODELS = ("ngram", "[ngram]")
_UNSUPPORTED_HEADS = ("medusa", "mlp_speculator")
_OTHER_NAMES: Mapping[str, str] = {
    "nextn": MTP,
    "draft-mtp": MTP,
    "draft-eagle3": "eagle3",
    "draft-simple": DRAFT_MODEL,
    "standalone": DRAFT_MODEL,
}
"""Names of methods in SGLang and llama.cpp, in lower case, and the method here."""

_LONGEST_NGRAM = 64
_LARGEST_DIFFERENCE = 1024
"""Models of one tokenizer may pad their vocabularies to different sizes."""


class NgramMethod(DraftMethod):
    """What followed the last tokens earlier in the sequence."""

    keys: ClassVar = ("prompt_lookup_min", "prompt_lookup_max")
    summary: ClassVar = "proposes what followed the same tokens earlier in the text"

    def read(self, settings: DraftSettings) -> SpeculativeConfig:
        count = settings.num_speculative_tokens()
        longest = settings.integer("prompt_lookup_max", 4, 1, _LONGEST_NGRAM)
        shortest = settings.integer("prompt_lookup_min", min(2, longest), 1, _LONGEST_NGRAM)
        if shortest > longest:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min is {shortest}, which is more than prompt_lookup_max "
                f"({longest}). Lower the one or raise the other."
            )
        return SpeculativeConfig(
            NGRAM, count, shortest, longest, proposer="mvllm.worker.spec_decode.ngram:NgramProposer"
        )


class DraftModelMethod(DraftMethod):
    """The tokens of a smaller model."""

    keys: ClassVar = ("model", "revision", "quantization")
    summary: ClassVar = 'runs a smaller model with the same tokenizer ({"model": NAME, "num_speculative_tokens": 4})'

    def read(self, settings: DraftSettings) -> SpeculativeConfig:
        count, target = settings.num_speculative_tokens(), settings.target
        name = settings.text("model")
        if name is None:
            raise ConfigError(
                "speculative_config: model is missing. Set the folder or hub name of a smaller model with the same "
                "tokenizer."
            )
        draft = settings.build_model(name, settings.text("revision"), settings.text("quantization"))
        if not draft.kind.generates:
            raise ConfigError(f"speculative_config: {draft.model} generates no tokens, so it cannot be a draft model.")
        if abs(draft.vocab_size - target.vocab_size) > _LARGEST_DIFFERENCE:
            raise ConfigError(
                f"speculative_config: the draft model's vocabulary has {draft.vocab_size} tokens, the model's "
                f"{target.vocab_size}. Both must have the same tokenizer."
            )
        if (difference := first_difference(draft.path, target.path)) is not None:
            id_, token, theirs = difference
            raise ConfigError(
                f"speculative_config: {draft.model} has another tokenizer than {target.model}: the token {id_} is "
                f"{token!r:.60} there, and {theirs!r:.60} here. Choose a draft model of the same family, or a method "
                "without one."
            )
        return SpeculativeConfig(
            DRAFT_MODEL,
            count,
            # Its rotary tables need no more rows than the target has positions.
            model=replace(draft, max_model_len=min(draft.max_model_len, target.max_model_len)),
            proposer="mvllm.worker.spec_decode.draft_model_proposer:DraftModelProposer",
        )


class MTPMethod(DraftMethod):
    """The tokens of the checkpoint's own multi-token-prediction module. The key `model` may repeat the served one."""

    keys: ClassVar = ("model",)
    summary: ClassVar = "runs the multi-token-prediction module of the model's own checkpoint"

    def read(self, settings: DraftSettings) -> SpeculativeConfig:
        target, name = settings.target, settings.text("model")
        if name not in (None, target.model, str(target.path)):
            raise ConfigError(
                f"speculative_config: the method {MTP!r} drafts with the module of the served model's checkpoint "
                f"({target.model}), but model is {name!r:.80}. Leave model out, or choose another method."
            )
        mtp, num_modules = mtp_heads(target)
        return SpeculativeConfig(
            MTP,
            settings.num_speculative_tokens(min(num_modules, MAX_SPECULATIVE_TOKENS)),
            model=target,
            proposer="mvllm.worker.spec_decode.head_proposer:HeadProposer",
            model_class=mtp.head,
            reads_hidden=True,
        )


_METHODS: Mapping[str, type[DraftMethod]] = {NGRAM: NgramMethod, DRAFT_MODEL: DraftModelMethod, MTP: MTPMethod}
"""Those of core."""


def read_speculative_config(
    settings: Mapping[str, Any] | None,
    build_model: BuildModel,
    read_config: ReadConfig,
    target: ModelConfig,
    *,
    with_weights: bool = True,
) -> SpeculativeConfig | None:
    """Checks the settings and reads the draft model's config, if there is one.

    Args:
        settings: The JSON object; None for the default.
        build_model: Builds the config of a draft model.
        read_config: Reads the `config.json` of a draft model.
        target: The target model.
        with_weights: Whether the checkpoint's weights are read. Otherwise the default is no speculative decoding.

    Returns:
        None without speculative decoding.

    Raises:
        ConfigError: A setting is unknown, missing, out of range, or of another method; or the models do not fit
            together.
        ModelError: The draft model cannot be found or is not usable.
    """
    is_default = settings is None
    if settings is None:
        settings = default_speculative_config(target) if target.kind.generates and with_weights else None
        if settings is None:
            return None
    if settings.get("method") == _NONE:
        if len(settings) > 1:
            raise ConfigError(f"speculative_config: the method {_NONE!r} has no other keys. Leave them out.")
        return None
    if not target.kind.generates:
        raise ConfigError("speculative_config is set, but the model generates no tokens. Leave it out.")
    if settings.get("model") in _NGRAM_MODELS:  # vLLM's earlier name of the method
        settings = {"method": NGRAM} | {key: value for key, value in settings.items() if key != "model"}
    name = settings["method"] if "method" in settings else _default_method(settings, read_config)
    method = _find(name)
    name = method.name or name
    allowed = (*COMMON_KEYS, *method.keys)
    if unknown := [key for key in settings if key not in allowed]:
        raise ConfigError(
            f"speculative_config has the key {unknown[0]!r:.40}, which the method {name!r} does not have."
            f"{_nearest(unknown[0], allowed)} Its keys: {', '.join(allowed)}."
        )
    adaptive = settings.get("adaptive", True)
    if not isinstance(adaptive, bool):
        raise ConfigError(f"speculative_config: adaptive must be true or false, found {adaptive!r:.40}.")
    found = method.read(DraftSettings(name, settings, target, build_model, read_config))
    return replace(found, adaptive=adaptive, is_default=is_default)


def _default_method(settings: Mapping[str, Any], read_config: ReadConfig) -> str:
    """The method that is meant where none is named: that of the architecture of the model, or else a draft model."""
    model, revision = settings.get("model"), settings.get("revision")
    if "model" not in settings:
        return NGRAM
    if isinstance(model, str) and (revision is None or isinstance(revision, str)):
        of_architectures = [name for name in plugin_groups.allowed_names(plugin_groups.PROPOSERS) if not name.islower()]
        if of_architectures:
            listed = read_config(model, revision).get("architectures")
            for name in listed if isinstance(listed, list) else ():
                if name in of_architectures:
                    return str(name)
    return DRAFT_MODEL


def _own_name(name: Any) -> Any:
    """The name here of a method that has another one in other engines; any other name as it is.

    vLLM names MTP modules after architectures, such as `deepseek_mtp`. SGLang writes names in capitals.
    """
    if not isinstance(name, str) or name in plugin_groups.allowed_names(plugin_groups.PROPOSERS):
        return name
    lower = name.lower()
    if lower.endswith("_mtp"):
        return MTP
    return _OTHER_NAMES.get(lower, lower if name.isupper() else name)


def _find(name: object) -> DraftMethod:
    """The method of that name, which may be that of another engine.

    Raises:
        ConfigError: There is none.
    """
    name = _own_name(name)
    if isinstance(name, str) and name in _METHODS:
        return _METHODS[name]()
    group = plugin_groups.PROPOSERS
    source = plugin_groups.find(group, name) if isinstance(name, str) else None
    if source is not None:
        return plugin_groups.load_class(group, source, DraftMethod, "proposers.DraftMethod")()
    others = tuple(other for other in plugin_groups.allowed_names(group) if other.islower())
    if name in _UNSUPPORTED_HEADS:
        reason = "is not supported: it drafts with heads that are trained for the model, which are not loaded."
    else:
        reason = f"does not exist.{_nearest(name, (*_METHODS, *others))}"
    raise ConfigError(
        f"speculative_config: the method {name!r:.40} {reason} There are "
        + ", ".join(f"{known!r}, which {method.summary}" for known, method in _METHODS.items())
        + "".join(f", {other!r}{_summary_of(other)}" for other in others)
        + f".{plugin_groups.missing_part_of(group)}"
    )


def _summary_of(name: str) -> str:
    """What a method of another package proposes; empty if the package cannot be loaded."""
    group = plugin_groups.PROPOSERS
    try:
        source = plugin_groups.require(group, name)
        return f", which {plugin_groups.load_class(group, source, DraftMethod, 'proposers.DraftMethod').summary}"
    except ConfigError:
        return ""


def _nearest(word: object, known: tuple[str, ...]) -> str:
    nearest = difflib.get_close_matches(str(word), known, n=1, cutoff=0.75)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
