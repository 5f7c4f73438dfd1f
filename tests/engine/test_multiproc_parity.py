"""Several worker processes give the tokens of transformers: tensor parallel, pipeline parallel, and both.

Each engine combines a step budget that cuts prompts into chunks, a cache that is too small for the running sequences,
so that they are preempted and recomputed, and prompts with cached prefixes. Every way of sharding runs with ranks as
threads, which start quickly. Worker processes run pipeline parallel, and tensor parallel with asynchronous
scheduling. `ci/dev.py test --all` runs every case both ways.
"""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from tests.helpers import parity
from tests.helpers.parity import BLOCK_SIZE, Oracle
from tests.helpers.thread_executor import ThreadExecutor

FAMILIES = ["llama-gqa", "mistral-window", "qwen2", "qwen3", "opt", "gpt2"]
WHICH = (0, 5, 6, 8, 10, 11, 15)
"""Prompts of the oracle, of 1 to 97 tokens. Some share prefixes."""
NUM_TOKENS = 24
SETTINGS = {"max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 32}
NUM_BLOCKS = 11
"""A few more than the longest sequence needs; six sequences would run."""

# Each case covers a different way of sharding: (checkpoint, tensor parallel, pipeline parallel).
LAYOUTS = {
    "one embedding serves the first stage and the head of the last": ("llama-mha-tied", 2, 2),
    "one key/value head is copied to both ranks; a bias is added by one rank alone": ("llama-mqa-biases", 2, 2),
    "the heads together are wider than the hidden state": ("llama-head-dim", 2, 1),
    "names without the first component": ("llama-without-prefix", 1, 2),
    "stages find their layers in different files": ("llama-many-files", 1, 2),
    "a vocabulary that two ranks cannot halve, tied": ("llama-odd-vocabulary-tied", 2, 2),
    "a vocabulary that leaves the last of four ranks fewer rows": ("qwen2-odd-vocabulary", 4, 1),
    "a window and a copied head": ("mistral-window-yarn", 2, 1),
    "copied heads, biases on queries, keys and values, and tied embeddings": ("qwen2-mqa-tied", 2, 2),
    "a window in the later layers only: a stage counts layers from the model's first": ("qwen2-window", 1, 2),
    "a window in every other layer, one layer per stage": ("qwen2-layer-types", 1, 3),
    "norms of each head, biases, and a window by layer": ("qwen3-biases-window", 2, 2),
    "norms of each head, wide heads, tied": ("qwen3-head-dim-tied", 2, 1),
    "projections around the layers that no rank shares, norms after": ("opt-norm-after-projected", 2, 2),
    "a projection after the last norm": ("opt-projected", 1, 2),
    "a head of its own, norms without weights": ("opt-untied-plain-norms", 2, 1),
    "attention that is scaled by the number of the layer in the whole model": ("gpt2-scaled-by-layer", 1, 2),
    "a head of its own beside a fused projection": ("gpt2-untied", 2, 1),
    "an inner width that is not four times the hidden one": ("gpt2-inner-relu", 2, 1),
    "norms over the heads of all ranks, one key/value head copied": ("olmo2-mqa-biases", 2, 2),
    "four ranks for two key/value heads": ("llama-gqa", 4, 1),
    "four ranks for one key/value head and norms of each head": ("qwen3-mqa", 4, 1),
}

COMBINED = {
    "four ranks for two key/value heads",
    "a window and a copied head",
    "copied heads, biases on queries, keys and values, and tied embeddings",
    "a window in every other layer, one layer per stage",
    "norms of each head, wide heads, tied",
    "a head of its own beside a fused projection",
    "an inner width that is not four times the hidden one",
    "four ranks for one key/value head and norms of each head",
    "names without the first component",
    "a window in the later layers only: a stage counts layers from the model's first",
    "norms of each head, biases, and a window by layer",
    "a head of its own, norms without weights",
    "one embedding serves the first stage and the head of the last",
}
"""Cases whose ways of sharding other cases have, too, in other combinations."""


def block_bytes(expected: Oracle, tensor: int, pipeline: int) -> int:
    """Bytes of one KV cache block on the rank with the largest share."""
    config = AutoConfig.from_pretrained(expected.folder)
    heads = config.num_attention_heads
    kv_heads = max(1, (getattr(config, "num_key_value_heads", None) or heads) // tensor)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return -(-config.num_hidden_layers // pipeline) * 2 * kv_heads * head_size * 4 * BLOCK_SIZE


def has_windows(expected: Oracle) -> bool:
    config = AutoConfig.from_pretrained(expected.folder)
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def check_under_pressure(name: str, tensor: int, pipeline: int, devices: int = 1, **settings: object) -> None:
    """Runs `tensor` x `pipeline` ranks, with workers that drive `devices` ranks each."""
    expected = parity.oracle(name, WHICH, NUM_TOKENS)
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    memory = NUM_BLOCKS * block_bytes(expected, tensor, pipeline) * devices
    if has_windows(expected):  # windows determine the size of a block, and the number that a sequence needs
        with parity.engine(expected.folder, **sizes, **SETTINGS, **settings) as llm:
            memory = parity.bytes_of_blocks(llm, llm.llm_engine.cache_summary.blocks_per_request)
    with parity.engine(expected.folder, kv_cache_memory_bytes=memory, **sizes, **SETTINGS, **settings) as llm:
        summary = llm.llm_engine.cache_summary
        most = NUM_BLOCKS if summary.windows == (None,) else summary.blocks_per_request
        assert most - 2 <= summary.num_blocks <= most  # a platform may round heads up, so that fewer fit
        assert max(map(len, expected.prompts)) > SETTINGS["max_num_batched_tokens"]
        parity.check(expected, parity.generate(llm, expected.prompts, max_tokens=NUM_TOKENS))
        stats = llm.llm_engine.stats
        # Layers with a window may never need more blocks than their first allocation.
        assert stats is not None and (stats.num_preemptions > 0 or summary.windows != (None,))

        backwards = list(range(len(expected.prompts)))[:-4:-1]  # the most recent prompts are still cached
        again = parity.generate(llm, [expected.prompts[i] for i in backwards], max_tokens=NUM_TOKENS)
        parity.check(expected, again, backwards)
        # Blocks that a window has passed are reused first.
        assert sum(output.num_cached_tokens for output in again) > 0 or summary.windows != (None,)


SHARDS, STAGES, BOTH = (2, 1), (1, 2), (2, 2)


@pytest.mark.slow
@pytest.mark.shows("layout")
@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        ("llama-gqa", *STAGES),
        *(pytest.param(name, *SHARDS, marks=pytest.mark.exhaustive) for name in FAMILIES),
        *(pytest.param(name, *STAGES, marks=pytest.mark.exhaustive) for name in FAMILIES[1:]),
        *(pytest.param(name, *BOTH, marks=pytest.mark.exhaustive) for name in FAMILIES),
    ],
)
def test_every_family_gives_the_tokens_of_transformers_under_pressure(name: str, tensor: int, pipeline: int) -> None:
    check_under_pressure(name, tensor, pipeline)


CUTS = pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        *(
            pytest.param(*layout, id=case, marks=pytest.mark.exhaustive if case in COMBINED else ())
            for case, layout in LAYOUTS.items()
        ),
        *(
            pytest.param(name, *BOTH, id=f"{name} in shards and stages", marks=pytest.mark.exhaustive)
            for name in FAMILIES[1:]
        ),
    ],
)


@pytest.mark.shows("layout")
@CUTS
def test_every_sharding_case_gives_the_tokens_of_transformers(name: str, tensor: int, pipeline: int) -> None:
    """A rank's shard of a tensor does not depend on where the rank runs: here, in a thread."""
    threads = f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}"
    check_under_pressure(name, tensor, pipeline, distributed_executor_backend=threads)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.shows("layout")
@pytest.mark.parametrize(("name", "tensor", "pipeline"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_sharding_case_gives_the_tokens_of_transformers_in_processes(
    name: str, tensor: int, pipeline: int
) -> None:
    check_under_pressure(name, tensor, pipeline)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "pipeline"), [SHARDS, pytest.param(*BOTH, marks=pytest.mark.exhaustive)], ids=["2-1", "2-2"]
)
def test_async_scheduling_gives_the_tokens_of_transformers(tensor: int, pipeline: int) -> None:
    check_under_pressure("qwen3", tensor, pipeline, async_scheduling=True)
