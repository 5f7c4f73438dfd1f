"""Checkpoints with sparse attention give the outputs of transformers with sequences longer than the selection."""

import pytest

from tests.helpers import parity
from tests.helpers.parity import NUM_TOKENS, Oracle, names_of
from tests.helpers.parity_suite import ParitySuite


@pytest.mark.exhaustive
class TestSparseAttention(ParitySuite):
    names = names_of("dsa", "glm5")
    num_tokens = NUM_TOKENS

    def test_four_samples_of_a_prompt_share_its_blocks(self, expected: Oracle) -> None:
        with parity.engine(expected.folder) as llm:
            for i in (6, 11):
                (output,) = parity.generate(llm, [expected.prompts[i]], n=4, temperature=1.0, top_k=1)
                assert [list(each.token_ids) for each in output.outputs] == [expected.tokens[i]] * 4
