"""The methods of speculative decoding of this package: their settings. This module needs no torch."""

from __future__ import annotations

from typing import ClassVar

from mvllm.extension_api.proposers import DraftMethod, DraftSettings, SpeculativeConfig

_TREE_DEPTH, _CACHED_REQUESTS = 24, 10_000
_CACHED_TOKENS = 1 << 20
_PREFIX = "suffix_decoding_"


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
