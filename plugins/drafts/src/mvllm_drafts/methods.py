"""The methods of speculative decoding of this package: their settings. This module needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from mvllm.extension_api import ModelError
from mvllm.extension_api.proposers import (
    ConfigError,
    DraftMethod,
    DraftSettings,
    HFConfig,
    ModelConfig,
    SpeculativeConfig,
)
from mvllm_drafts.eagle_config import overrides, read_layout

_TREE_DEPTH, _CACHED_REQUESTS = 24, 10_000
_CACHED_TOKENS = 1 << 20
_PREFIX = "suffix_decoding_"
_DEMO = "demo"
DEMO_HEAD = Path(__file__).parent / "demo_head"
"""The folder of the EAGLE-3 head of mvllm's demo model."""
_ONE_BY_ONE = "mvllm.extension_api.draft_heads:HeadProposer"


class SuffixMethod(DraftMethod):
    """Suffix decoding. The keys are vLLM's, and `suffix_decoding_max_cached_tokens`."""

    keys: ClassVar = tuple(
        f"{_PREFIX}{key}"
        for key in ("max_tree_depth", "max_cached_requests", "max_cached_tokens", "max_spec_factor", "min_token_prob")
    )
    summary: ClassVar = "proposes what followed the same tokens in the request or in recent outputs, by frequency"

    def read(self, settings: DraftSettings) -> SpeculativeConfig:
        depth = settings.integer(f"{_PREFIX}max_tree_depth", _TREE_DEPTH, 2, 1024)
        return SpeculativeConfig(
            settings.method,
            settings.num_speculative_tokens(min(depth, 24)),
            proposer="mvllm_drafts.suffix_proposer:SuffixProposer",
            options={
                "max_tree_depth": depth,
                "max_cached_requests": settings.integer(f"{_PREFIX}max_cached_requests", _CACHED_REQUESTS, 0, 10**9),
                "max_cached_tokens": settings.integer(f"{_PREFIX}max_cached_tokens", _CACHED_TOKENS, 1024, 1 << 28),
                "max_spec_factor": settings.number(f"{_PREFIX}max_spec_factor", 1.0, 0.0, 1024.0),
                "min_token_prob": settings.number(f"{_PREFIX}min_token_prob", 0.1, 0.0, 1.0),
            },
        )


class EagleMethod(DraftMethod):
    """EAGLE."""

    name: ClassVar = "eagle"
    keys: ClassVar = ("model", "revision", "quantization")
    summary: ClassVar = "drafts with a head that reads the model's last hidden states"

    def read(self, settings: DraftSettings) -> SpeculativeConfig:
        config = head_config(settings)
        draft = build_head(settings, overrides(config))
        if (draft.hidden_size, draft.vocab_size) != (settings.target.hidden_size, settings.target.vocab_size):
            raise ModelError(
                f"{config.source}: the head has hidden states of {draft.hidden_size} elements and {draft.vocab_size} "
                f"tokens, but {settings.target.model} has {settings.target.hidden_size} and "
                f"{settings.target.vocab_size}. Use a head that was trained for this model."
            )
        return SpeculativeConfig(
            settings.method,
            settings.num_speculative_tokens(3),
            model=draft,
            proposer=_ONE_BY_ONE,
            model_class="mvllm_drafts.eagle:EagleHead",
            reads_hidden=True,
        )


class Eagle3Method(DraftMethod):
    """EAGLE-3."""

    name: ClassVar = "eagle3"
    keys: ClassVar = ("model", "revision", "quantization", "parallel_drafting")
    summary: ClassVar = "drafts with a head that reads hidden states of three layers of the model"

    def read(self, settings: DraftSettings) -> SpeculativeConfig:
        config = head_config(settings)
        layout = read_layout(config, settings.target)
        is_parallel = settings.flag("parallel_drafting", layout.mask_token_id is not None)
        if is_parallel and layout.mask_token_id is None:
            raise ConfigError(
                f"speculative_config: parallel_drafting is true, but {config.source} has no mask token (ptd_token_id, "
                "pard_token or mask_token_id): the head drafts one token after the other. Leave parallel_drafting out."
            )
        if not is_parallel:
            layout = replace(layout, mask_token_id=None)
        return SpeculativeConfig(
            settings.method,
            settings.num_speculative_tokens(3),
            model=build_head(settings, overrides(config, layout)),
            proposer="mvllm_drafts.parallel_proposer:ParallelProposer" if is_parallel else _ONE_BY_ONE,
            model_class="mvllm_drafts.eagle:Eagle3Head",
            reads_hidden=not layout.layers,
            reads_layers=layout.layers,
        )


def head_config(settings: DraftSettings) -> HFConfig:
    """The config.json of the head.

    Raises:
        ConfigError: No model is named.
        ModelError: The file cannot be read.
    """
    return settings.read_config(head_name(settings), settings.text("revision"))


def build_head(settings: DraftSettings, hf_overrides: Mapping[str, Any]) -> ModelConfig:
    """The config of a head. Positions go as far as the served model's: heads are trained on shorter texts."""
    name, revision, quantization = head_name(settings), settings.text("revision"), settings.text("quantization")
    draft = settings.build_model(name, revision, quantization, hf_overrides)
    return replace(draft, max_model_len=settings.target.max_model_len)


def head_name(settings: DraftSettings) -> str:
    """The folder or name of the head; `demo` is the head in this package.

    Raises:
        ConfigError: No model is named.
    """
    name = settings.text("model")
    if name is None:
        raise ConfigError(
            f"speculative_config: the method {settings.method!r} needs the head's checkpoint. Set model to its folder "
            "or name."
        )
    return str(DEMO_HEAD) if name == _DEMO and settings.method == Eagle3Method.name else name
