"""Engines with Mamba-2 layers give the tokens of transformers: on several ranks, and with preemption.

The engines on several ranks combine a step budget that cuts prompts into chunks with prefix hits and few requests at a
time.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import parity
from tests.helpers.parity import BLOCK_SIZE
from tests.helpers.thread_executor import ThreadExecutor

WHICH = (0, 5, 6, 8, 11)
"""Prompts of the oracle, of 1 to 97 tokens. Some share prefixes."""
SHORT = (1, 2, 3, 4, 5, 12)
"""Prompts of up to two blocks, which all run at first."""
NUM_TOKENS = 24
SETTINGS = {"max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 32, "state_snapshot_interval": 32}

SHARDS, STAGES, BOTH = (2, 1), (1, 2), (2, 2)
NAMES = ("granitehybrid", "falconh1", "nemotronh")
FURTHER = (
    *("granitehybrid-dense", "granitehybrid-biases"),
    *("falconh1-norm", "falconh1-norm-first"),
    *("nemotronh-latent", "nemotronh-biases"),
    "bamba-groups",
)


@pytest.mark.shows("layout")
@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        ("granitehybrid", *BOTH),
        *(pytest.param(name, *BOTH, marks=pytest.mark.exhaustive) for name in NAMES[1:]),
        *(pytest.param(name, *SHARDS, marks=pytest.mark.exhaustive) for name in (*NAMES, *FURTHER, "mamba2")),
        *(pytest.param(name, *STAGES, marks=pytest.mark.exhaustive) for name in (*NAMES, *FURTHER, "mamba2")),
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


def bytes_of_sequences(model: Any) -> tuple[int, int]:
    """Bytes of a state slot and of a block."""
    slot = sum(layer.backend.bytes_per_sequence() for layer in model.state_layers())
    return slot, BLOCK_SIZE * sum(layer.backend.kv_layout().bytes_per_token for layer in model.attention_layers())


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in (*NAMES[1:], *FURTHER))]
)
def test_preempted_requests_are_recomputed(name: str) -> None:
    expected = parity.oracle(name, SHORT, 2 * NUM_TOKENS)
    with parity.engine(expected.folder) as llm:
        ((slot, block),) = llm.apply_model(bytes_of_sequences)
    memory = 7 * slot + 9 * block  # the longest sequence needs 8 blocks
    settings = SETTINGS | {"max_num_seqs": 5, "kv_cache_memory_bytes": memory}
    with parity.engine(expected.folder, **settings) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts, max_tokens=2 * NUM_TOKENS))
        stats = llm.llm_engine.stats
        assert stats is not None and stats.num_preemptions > 0
