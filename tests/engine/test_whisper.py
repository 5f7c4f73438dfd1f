"""Whisper in the engine gives the greedy tokens of transformers."""

from __future__ import annotations

import pytest

from tests.helpers.multimodal_suite import BLOCK_SIZE, NUM_TOKENS, THREADS, engine
from tests.helpers.whisper import WHISPERS, generate, whisper_oracle

LENGTH = {"max_model_len": 256, "max_num_batched_tokens": 256}


@pytest.mark.exhaustive
@pytest.mark.shows("tokens", family="whisper")
def test_sounds_and_text_in_one_batch() -> None:
    expected = whisper_oracle("whisper")
    with engine(expected.folder, **LENGTH) as llm:
        expected.check(generate(llm, [expected.requests[1]]), [1])
        expected.check(generate(llm, expected.requests))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WHISPERS)
class TestWhisper:
    @pytest.mark.shows("tokens")
    def test_alone_and_after_prefix_hits(self, name: str) -> None:
        """Requests 1, 3 and 6 have the same first tokens; 1 and 6 have the same sound, 3 has another one."""
        expected = whisper_oracle(name)
        with engine(expected.folder, **LENGTH) as llm:
            for index, hits in ((1, False), (3, False), (6, True), (1, True)):
                (output,) = generate(llm, [expected.requests[index]])
                expected.check([output], [index])
                prompt = len(expected.prompt_ids(expected.requests[1])) - (index == 1)
                assert output.num_cached_tokens == (prompt // BLOCK_SIZE * BLOCK_SIZE if hits else 0)
            expected.check(generate(llm, expected.requests))

    def test_cut_into_chunks(self, name: str) -> None:
        expected = whisper_oracle(name)
        with engine(expected.folder, max_model_len=256, max_num_batched_tokens=11) as llm:
            expected.check(generate(llm, expected.requests))

    def test_preempted_and_recomputed(self, name: str) -> None:
        expected = whisper_oracle(name)
        with engine(expected.folder, **LENGTH) as llm:
            summary = llm.llm_engine.cache_summary
        longest = max(len(expected.prompt_ids(request)) for request in expected.requests) + NUM_TOKENS
        memory = summary.total_bytes // summary.num_blocks * (-(-longest // BLOCK_SIZE) + 3)
        with engine(expected.folder, kv_cache_memory_bytes=memory, max_model_len=longest) as llm:
            expected.check(generate(llm, expected.requests))
            stats = llm.llm_engine.stats
            assert stats is not None and stats.num_preemptions > 0

    @pytest.mark.shows("layout")
    @pytest.mark.parametrize("tensor", [2])
    def test_on_two_ranks(self, name: str, tensor: int) -> None:
        expected = whisper_oracle(name)
        settings = {"distributed_executor_backend": THREADS, "tensor_parallel_size": tensor, **LENGTH}
        with engine(expected.folder, **settings) as llm:
            expected.check(generate(llm, expected.requests))
