"""Engines with delta rules or short convolutions beside attention give the tokens of transformers.

Each engine combines a step budget that cuts prompts into chunks with prefix hits and few requests at a time. Every mode
alone is in tests/conformance/models.
"""

from __future__ import annotations

import pytest

from tests.helpers import parity
from tests.helpers.paged_driver import load_model
from tests.helpers.parity import BLOCK_SIZE, Oracle
from tests.helpers.thread_executor import ThreadExecutor

WHICH = (0, 5, 6, 8, 11)
"""Prompts of the oracle, of 1 to 97 tokens. Some share prefixes."""
NUM_TOKENS = 24
SETTINGS = {"max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 32, "state_snapshot_interval": 32}
THREADS = {"distributed_executor_backend": f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}"}

FAMILIES = ("qwen3next", "qwen35", "qwen35moe", "lfm2", "lfm2moe", "kimilinear", "olmohybrid")
SHARDS, STAGES, BOTH = (2, 1), (1, 2), (2, 2)
EXHAUSTIVE = [
    (name, *sizes)
    for name in parity.names_of(*FAMILIES)
    for sizes in (SHARDS, STAGES, BOTH)
    if (name, sizes) != ("qwen3next", BOTH)
]


def check(expected: Oracle, **settings: object) -> None:
    with parity.engine(expected.folder, **{**SETTINGS, **settings}) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts, max_tokens=NUM_TOKENS))
        again = parity.generate(llm, expected.prompts, max_tokens=NUM_TOKENS)
        parity.check(expected, again)
        assert sum(output.num_cached_tokens for output in again) > 0


@pytest.mark.shows("tokens")
@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank_gives_the_tokens_of_transformers(name: str) -> None:
    check(parity.oracle(name, WHICH, NUM_TOKENS))


@pytest.mark.shows("layout")
@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [("qwen3next", *BOTH), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in EXHAUSTIVE)],
)
def test_several_ranks_give_the_tokens_of_transformers(name: str, tensor: int, pipeline: int) -> None:
    expected = parity.oracle(name, WHICH, NUM_TOKENS)
    check(expected, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **THREADS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_preempted_requests_give_the_tokens_of_transformers(name: str) -> None:
    """Blocks for two of the four requests, and a slot for each."""
    expected = parity.oracle(name)
    model = load_model(expected.folder)
    of_slot = sum(layer.spec.bytes_per_sequence for layer in model.state_layers())
    of_block = BLOCK_SIZE * sum(layer.backend.kv_layout().bytes_per_token for layer in model.attention_layers())
    memory = 6 * of_slot + 22 * of_block
    with parity.engine(expected.folder, max_num_seqs=4, kv_cache_memory_bytes=memory) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts))
        stats = llm.llm_engine.stats
        assert stats is not None and stats.num_preemptions > 0
