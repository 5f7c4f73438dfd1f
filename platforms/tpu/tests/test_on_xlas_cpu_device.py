"""Whole engines on XLA's CPU device: tokens equal those of transformers, and nothing is compiled after the warm-up.

Requires torch_xla and PJRT_DEVICE=CPU; skipped otherwise.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("torch_xla", reason="torch_xla is not installed: it wants the torch of its own version")
if os.environ.get("PJRT_DEVICE") != "CPU":
    pytest.skip("PJRT_DEVICE is not CPU", allow_module_level=True)

import torch
import torch_xla
import torch_xla.debug.metrics as metrics

from mvllm import LLM, SamplingParams
from mvllm.multimodal import processor_client
from mvllm.testing.attention_cases import make_spec
from mvllm.testing.zoo import Zoo
from mvllm_tpu.attention import XlaMetadata
from mvllm_tpu.lazy_runtime import num_compilations
from mvllm_tpu.runtimes.lazy_attention import LazyAttention
from mvllm_tpu.step_compiler import LazyStepCompiler
from tests.helpers import multimodal_suite, parity

LENGTHS = (3, 21, 40, 57)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return Zoo(tmp_path_factory.mktemp("models"))


def engine(folder, **settings):
    """An engine with small limits: prompts are chunked, and steps use all page buckets."""
    defaults = {
        "platform": "tpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 96,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "kv_cache_memory_bytes": 2**24,
        "use_tqdm_on_load": False,
    }
    return LLM(str(folder), **(defaults | settings))


def greedy(llm, prompts):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_tokens_equal_transformers_with_chunks_prefix_hits_and_preemption(zoo, family):
    expected = zoo.oracle(family, LENGTHS, NUM_TOKENS)
    with engine(expected.folder) as llm:
        warm = num_compilations()
        tokens, _ = greedy(llm, expected.prompts)  # 40 and 57 tokens do not fit into a step of 32
        assert tokens == expected.tokens
        tokens, cached = greedy(llm, expected.prompts)
        assert tokens == expected.tokens and min(cached[1:]) > 0, "the prompts are in the cache by now"
        assert num_compilations() == warm
        summary = llm.llm_engine.cache_summary
    # Requests grow from 5 to 8 blocks: two of them start, and one is preempted.
    expected = zoo.oracle(family, (20,) * 3, NUM_TOKENS)
    small = {"kv_cache_memory_bytes": 13 * (summary.total_bytes // summary.num_blocks), "max_model_len": 32}
    with engine(expected.folder, **small) as llm:
        warm = num_compilations()
        tokens, _ = greedy(llm, expected.prompts)
        assert tokens == expected.tokens
        assert llm.llm_engine.stats.num_preemptions > 0
        assert num_compilations() == warm


@pytest.mark.parametrize("name", ["bamba", "qwen35"])
def test_hybrid_models_give_the_tokens_of_transformers_with_chunks_and_kept_states(name):
    """Mamba-2 and gated DeltaNet together with attention. Decode steps and chunks of as many tokens as rows are
    programs of their own, all of them from the warm-up."""
    expected = parity.oracle(name, (0, 5, 6, 8, 11), NUM_TOKENS)
    settings = {"state_snapshot_interval": 16, "max_model_len": 128, "max_num_batched_tokens": 16}
    with engine(expected.folder, **settings) as llm:
        warm = num_compilations()
        for _ in range(2):
            tokens, cached = greedy(llm, expected.prompts)
            assert tokens == expected.tokens
        assert max(cached) >= 16, "the second time from kept states"
        assert num_compilations() == warm and metrics.counter_value("DynamoExtractCompiledGraph") > 0


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_images_give_the_tokens_of_transformers_without_a_compilation(name):
    """Rows of plain embeddings; three-dimensional positions and rows added after layers. Encoders run on the host."""
    expected = multimodal_suite.oracle(name)
    settings = {"max_model_len": 256, "skip_tokenizer_init": False, "dtype": "float32"}
    with (
        patch.object(processor_client, "_make_pool", multimodal_suite.ProcessorHere),
        engine(expected.folder, **settings) as llm,
    ):
        warm = num_compilations()
        for _ in range(2):
            outputs = multimodal_suite.generate(llm, expected.requests[:3], num_tokens=NUM_TOKENS)
            multimodal_suite.check(expected, outputs)
        assert num_compilations() == warm and metrics.counter_value("DynamoExtractCompiledGraph") > 0


def test_random_traffic_compiles_nothing_after_the_warm_up(zoo):
    rng = random.Random(0)
    with engine(zoo.checkpoint("llama"), block_size=16) as llm:
        warm = num_compilations()
        assert warm > 0 and metrics.counter_value("DynamoExtractCompiledGraph") > 0, "steps are compiled"
        for _ in range(6):
            prompts = [
                {"prompt_token_ids": [rng.randrange(2, 90) for _ in range(rng.randint(1, 70))]}
                for _ in range(rng.randint(1, 12))
            ]
            params = [
                SamplingParams(
                    temperature=rng.choice([0.0, 0.3, 1.0]),
                    top_k=rng.choice([-1, 1, 5, 40]),
                    top_p=rng.choice([1.0, 0.9, 0.3]),
                    min_p=rng.choice([0.0, 0.1]),
                    seed=rng.choice([None, 7]),
                    max_tokens=rng.randint(1, 20),
                    ignore_eos=True,
                    detokenize=False,
                )
                for _ in prompts
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [each.max_tokens for each in params]
        assert num_compilations() == warm


def test_a_compiled_step_writes_the_cache_in_place():
    device = torch_xla.device()
    backend = LazyAttention(make_spec(dtype="float32"))
    cache = backend.allocate(64, 4, device)

    def function(key, slots):
        metadata = XlaMetadata(None, slots, *[slots] * 6)
        backend.write_kv(cache, key, key + 1.0, metadata)
        return key.sum()

    step = LazyStepCompiler().compile(function, dynamic=False)
    places = [torch_xla._XLAC._unsafe_buffer_pointer(part) for part in cache]
    spec = backend.spec
    with torch.no_grad():
        for slot in (3, 200, 77):
            key = torch.full((2, spec.num_kv_heads, spec.head_size), float(slot))
            step(key.to(device), torch.tensor([slot, slot + 1], dtype=torch.int32).to(device))
            torch_xla.sync(wait=True)
            assert [torch_xla._XLAC._unsafe_buffer_pointer(part) for part in cache] == places
    keys, values = (part.cpu().flatten(0, 1)[:, 0, 0] for part in cache)
    assert keys[[3, 4, 200, 201, 77, 78]].tolist() == [3, 3, 200, 200, 77, 77]
    assert values[[3, 200, 77]].tolist() == [4, 201, 78] and int((keys != 0).sum()) == 6
    assert metrics.counter_value("DynamoExtractCompiledGraph") >= 1


def test_an_engine_uses_no_graph_of_an_earlier_one():
    """XLA may have dropped the earlier one's programs."""

    def function(x):
        return x + 1

    x = torch.ones(3).to(torch_xla.device())
    with torch.no_grad():
        for _ in range(2):
            before = metrics.counter_value("DynamoExtractCompiledGraph") or 0
            step = LazyStepCompiler().compile(function, dynamic=False)
            assert [step(x).cpu().tolist() for _ in range(2)] == [[2, 2, 2]] * 2
            assert metrics.counter_value("DynamoExtractCompiledGraph") == before + 1


def test_seeded_tokens_do_not_depend_on_other_requests_of_the_step(zoo):
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True, detokenize=False)
    other = SamplingParams(temperature=0.7, top_k=9, max_tokens=5, ignore_eos=True, detokenize=False)
    with engine(zoo.checkpoint("llama")) as llm:
        [alone] = llm.generate([prompt], seeded, use_tqdm=False)
        among = llm.generate([prompt] * 4, [other, seeded, other, other], use_tqdm=False)
    assert list(among[1].outputs[0].token_ids) == list(alone.outputs[0].token_ids)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llama"])
def test_one_worker_with_two_devices_gives_the_same_tokens_with_sharded_weights(tmp_path, family):
    """The program checks the shards of each weight and XLA's number of compilations."""
    script = Path(__file__).with_name("two_devices.py")
    done = subprocess.run(
        [sys.executable, script, family, tmp_path],
        env={**os.environ, "CPU_NUM_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0 and "two devices: well" in done.stdout, (done.stdout + done.stderr)[-3000:]
