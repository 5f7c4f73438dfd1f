"""Engines with delta rules or short convolutions beside attention: several ranks, and preemption.

The engine's outputs are those of transformers. Each engine on several ranks combines a step budget that cuts prompts
into chunks with prefix hits and few requests at a time.
"""

from __future__ import annotations

import pytest

from tests.helpers import parity
from tests.helpers.thread_executor import ThreadExecutor

WHICH = (0, 5, 6, 8, 11)
"""Prompts of the oracle, of 1 to 97 tokens. Some share prefixes."""
NUM_TOKENS = 24
SETTINGS = {"max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 32, "state_snapshot_interval": 32}

SHARDS, STAGES, BOTH = (2, 1), (1, 2), (2, 2)
NAMES = parity.names_of("qwen3next", "qwen35", "qwen35moe", "lfm2", "lfm2moe", "kimilinear", "olmohybrid")


@pytest.mark.shows("layout")
@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        ("qwen3next", *BOTH),
        *(
            pytest.param(name, *sizes, marks=pytest.mark.exhaustive)
            for name in NAMES
            for sizes in (SHARDS, STAGES, BOTH)
            if (name, sizes) != ("qwen3next", BOTH)
        ),
    ],
)
def test_several_ranks_give_the_tokens_of_transformers(name: str, tensor: int, pipeline: int) -> None:
    expected = parity.oracle(name, WHICH, NUM_TOKENS)
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    threads = f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}"
    with parity.engine(expected.folder, **sizes, **SETTINGS, distributed_executor_backend=threads) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts, max_tokens=NUM_TOKENS))
        again = parity.generate(llm, expected.prompts, max_tokens=NUM_TOKENS)
        parity.check(expected, again)
        assert sum(output.num_cached_tokens for output in again) > 0
