"""Parity tests of one model family with sequence states; each family has its own file.

class TestMamba2(StateParitySuite):
    names = names_of("mamba2")
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.helpers import parity
from tests.helpers.parity import BLOCK_SIZE, NUM_TOKENS, Oracle

WHICH = (0, 3, 6, 9, 11)
"""Prompts for runs of one request at a time, some with common prefixes."""


@pytest.mark.shows("tokens")
class StateParitySuite:
    """`checkpoint` iterates over `names`. The engine's outputs equal those of transformers in every mode."""

    names: ClassVar[list[str]] = []

    @pytest.fixture
    def expected(self, checkpoint: str) -> Oracle:
        return parity.oracle(checkpoint, num_tokens=NUM_TOKENS)

    def test_alone_in_a_batch_and_after_prefix_hits(self, expected: Oracle) -> None:
        with parity.engine(expected.folder) as llm:
            for i in WHICH:
                parity.check(expected, parity.generate(llm, [expected.prompts[i]]), [i])
            assert llm.reset_prefix_cache()
            parity.check(expected, parity.generate(llm, expected.prompts))
            again = parity.generate(llm, expected.prompts)
            parity.check(expected, again)
            cached = [output.num_cached_tokens for output in again]
            assert max(cached) >= BLOCK_SIZE and all(count % BLOCK_SIZE == 0 for count in cached)

    def test_cut_into_chunks_by_a_tiny_budget(self, expected: Oracle) -> None:
        with parity.engine(expected.folder, max_num_seqs=8, max_num_batched_tokens=11) as llm:
            outputs = parity.generate(llm, expected.prompts, prompt_logprobs=1)
            parity.check(expected, outputs)
            parity.check_prompt_logprobs(expected, outputs)

    def test_four_samples_of_a_prompt_start_from_one_state(self, expected: Oracle) -> None:
        with parity.engine(expected.folder) as llm:
            for i in (6, 11):
                (output,) = parity.generate(llm, [expected.prompts[i]], n=4, temperature=1.0, top_k=1)
                assert [list(each.token_ids) for each in output.outputs] == [expected.tokens[i]] * 4

    def test_waiting_for_state_slots_and_preempted(self, expected: Oracle) -> None:
        with parity.engine(expected.folder, max_num_seqs=3) as llm:
            parity.check(expected, parity.generate(llm, expected.prompts))
