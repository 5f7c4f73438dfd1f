"""Parity tests of one model family; each family has its own file, so that they run in parallel.

class TestLlama(ParitySuite):
    names = names_of("llama")
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from mvllm import LLM, RequestOutput
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from tests.helpers import parity
from tests.helpers.parity import BLOCK_SIZE, Oracle

NUM_TOKENS = 40
"""More than two blocks, and enough for every window and RoPE scaling of the zoo to take effect."""
_summaries: dict[Path, KVCacheSummary] = {}
"""The KV cache of each checkpoint with the default settings."""


@pytest.mark.shows("tokens")
class ParitySuite:
    """`checkpoint` iterates over `names`. The engine's outputs equal those of transformers in every mode."""

    names: ClassVar[list[str]] = []
    num_tokens: ClassVar[int] = NUM_TOKENS

    @pytest.fixture
    def expected(self, checkpoint: str) -> Oracle:
        return parity.oracle(checkpoint, num_tokens=self.num_tokens)

    def generate(self, llm: LLM, prompts: list[list[int]], **settings: object) -> list[RequestOutput]:
        return parity.generate(llm, prompts, max_tokens=self.num_tokens, **settings)

    def test_alone_in_a_batch_and_after_prefix_hits(self, expected: Oracle) -> None:
        with parity.engine(expected.folder) as llm:
            _summaries[expected.folder] = llm.llm_engine.cache_summary
            for i in (0, 5, 11):
                parity.check(expected, self.generate(llm, [expected.prompts[i]]), [i])
            assert llm.reset_prefix_cache()
            parity.check(expected, self.generate(llm, expected.prompts))

            again = self.generate(llm, expected.prompts)
            parity.check(expected, again)
            for output, prompt in zip(again, expected.prompts, strict=True):
                assert output.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE

    def test_cut_into_chunks_by_a_tiny_budget(self, expected: Oracle) -> None:
        with parity.engine(expected.folder, max_num_seqs=8, max_num_batched_tokens=11) as llm:
            outputs = self.generate(llm, expected.prompts, prompt_logprobs=1)
            parity.check(expected, outputs)
            parity.check_prompt_logprobs(expected, outputs)

    def test_preempted_and_recomputed(self, expected: Oracle) -> None:
        if expected.folder not in _summaries:  # else the test above has asked for it
            with parity.engine(expected.folder) as llm:
                _summaries[expected.folder] = llm.llm_engine.cache_summary
        summary = _summaries[expected.folder]
        # Layers with a window soon need fewer blocks than at first.
        thirds = 6 if summary.windows == (None,) else 4 if None in summary.windows else 3
        enough_for_few = summary.total_bytes // summary.num_blocks * (summary.blocks_per_request * thirds // 3)
        with parity.engine(expected.folder, kv_cache_memory_bytes=enough_for_few) as llm:
            parity.check(expected, self.generate(llm, expected.prompts))
            stats = llm.llm_engine.stats
            # A request whose layers all have a window may never need more blocks than its first allocation.
            assert stats is not None and (stats.num_preemptions > 0 or None not in summary.windows)
