"""Each method of this package with what engines can do: the tokens are those without drafts, and some are accepted."""

from __future__ import annotations

import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from plugins.drafts.tests.eagle_heads import agreeing_head, change_little, head_settings, write_eagle3
from safetensors.torch import load_file

from mvllm import LoRARequest, SamplingParams
from mvllm.platform.interface import Platform
from mvllm.platform.shapes import ShapePolicy
from tests.engine.conftest import MakeLLM
from tests.engine.test_async_scheduling import TIGHT
from tests.engine.test_data_parallel import check_streams_of_replicas
from tests.engine.test_items_in_tiers import FAMILIES
from tests.engine.test_random_traffic import check_random_traffic
from tests.engine.test_speculative import (
    GREEDY,
    THREADS,
    acceptance,
    change_draft_lengths,
    check_aborts,
    check_close,
    check_distribution,
    check_grammars,
    drafts,
    draw,
    random_requests,
    run,
    tokens,
)
from tests.helpers import multimodal_suite
from tests.helpers.changed_weights import tensors_of
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.multimodal_zoo import VOCAB_SIZE as MULTIMODAL_VOCAB
from tests.helpers.parity import bytes_of_blocks, engine
from tests.helpers.threads import generate_in_threads

BUCKETS = ShapePolicy(tokens=(4, 24, 64, 128), requests=(3, 16), pages=(1, 3, 40))
METHODS = ("suffix", "eagle3", "parallel")


def methods(*every_run: str) -> list[Any]:
    """Parameters: the methods of every run, and the others for exhaustive ones."""
    every = (*METHODS, "eagle")
    return [pytest.param(each, marks=[pytest.mark.exhaustive] * (each not in every_run)) for each in every]


@cache
def model(noise: float = 0.05) -> Path:
    """A Llama whose next token depends mostly on the last one, or with 0 on nothing else."""
    return change_little(drafts(), Path(tempfile.mkdtemp(prefix="mvllm-model-")) / "model", noise)


@cache
def head(kind: str) -> Path:
    """A head that often predicts what `model` does."""
    return agreeing_head(kind, Path(tempfile.mkdtemp(prefix="mvllm-head-")) / kind)


def speculative(method: str, count: int = 3, **settings: Any) -> dict[str, Any]:
    """`speculative_config` of a method; of EAGLE with a head for `model`."""
    settings = {"num_speculative_tokens": count, "adaptive": False, **settings}
    return {"method": method, **settings} if method == "suffix" else head_settings(head(method), **settings)


def gained(before: tuple[int, int], after: tuple[int, int]) -> tuple[int, int]:
    """Numbers of draft tokens and accepted tokens between two calls of `acceptance`."""
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize(
    ("method", "ahead"),
    [
        ("suffix", True),
        ("eagle3", False),
        ("parallel", True),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (("suffix", False), ("eagle3", True), ("parallel", False), ("eagle", True), ("eagle", False))
        ),
    ],
)
def test_random_traffic_keeps_the_state_consistent_and_the_outputs_correct(
    make_llm: MakeLLM, method: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_draft_lengths(monkeypatch)
    size = TIGHT["kv_cache_memory_bytes"] * (1 if method == "suffix" else 3)
    settings = {"model": model(), "kv_cache_memory_bytes": size, "async_scheduling": ahead}
    settings["speculative_config"] = speculative(method, adaptive=True)
    check_random_traffic(make_llm, settings, num_requests=40)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(3, 60))])
def test_random_engines_and_requests_give_the_outputs_without_drafts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted requests are also swapped to host memory and back."""
    rng = random.Random(seed)
    change_draft_lengths(monkeypatch)
    folder = model(rng.choice([0.05, 0.05, 1.0]))
    prompts, wanted = random_requests(rng)
    method = (*METHODS, "eagle")[seed % 4]
    settings: dict[str, Any] = {
        "speculative_config": speculative(method, rng.choice([1, 2, 3, 5, 8]), adaptive=rng.random() < 0.7),
        "max_num_seqs": rng.choice([1, 3, 16]),
        "max_num_batched_tokens": rng.choice([16, 17, 40, 64]),
        "async_scheduling": seed % 3 > 0,
    }
    if rng.random() < 0.3:
        settings |= {"distributed_executor_backend": THREADS, "tensor_parallel_size": 2}
    with engine(folder) as llm:
        expected = run(llm, prompts, wanted)
    if rng.random() < 0.6:
        with engine(folder, **settings) as llm:
            num_blocks = llm.llm_engine.cache_summary.blocks_per_request + rng.choice([0, 2])
            settings["kv_cache_memory_bytes"] = bytes_of_blocks(llm, num_blocks)
        if rng.random() < 0.6:
            settings |= {"kv_offloading_size": 0.05, "preemption_mode": "swap"}
    with engine(folder, **settings) as llm:
        for num_threads in (1, 3):
            check_close(generate_in_threads(llm, prompts, wanted, num_threads), expected)
        llm.llm_engine._client._core.scheduler.check_integrity()


@pytest.mark.parametrize("method", methods("suffix", "eagle3"))
def test_requests_with_grammars_have_drafts(make_llm: MakeLLM, method: str) -> None:
    engines = [{"speculative_config": speculative(method, 5), "async_scheduling": method != "eagle3"}]
    check_grammars(make_llm, engines, model=model())


@pytest.mark.parametrize("method", methods("suffix", "parallel"))
def test_an_aborted_request_leaves_no_state(make_llm: MakeLLM, method: str) -> None:
    check_aborts(make_llm, speculative(method), model=model(), async_scheduling=method != "suffix")


@pytest.mark.parametrize("method", methods("suffix", "eagle3"))
def test_adapters_change_the_model_and_not_the_head(make_llm: MakeLLM, tmp_path: Path, method: str) -> None:
    adapter = LoRARequest("one", 1, str(write_adapter(tmp_path / "one", model())))
    prompts, whose = [draw(random.Random(3), 20)] * 3, [None, adapter, None]
    params, found = SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True, repetition_penalty=1.2), []
    for drafting in (None, speculative(method)):
        llm = make_llm(model=model(), enable_lora=True, speculative_config=drafting)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False, lora_request=whose)
        found.append([[list(each.token_ids) for each in output.outputs] for output in outputs])
        plain = tokens(llm.generate(asked, SamplingParams(max_tokens=12, **GREEDY), use_tqdm=False, lora_request=whose))
        found[-1].append(plain)
    assert found[0] == found[1] and acceptance(llm)[1] > 0
    assert found[0][0] == found[0][2] != found[0][1]


@pytest.mark.parametrize(
    ("kind", "settings", "own_embedding"),
    [
        ("eagle", {}, True),
        ("eagle3", {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS}, False),
        ("parallel", {"async_scheduling": True}, True),
    ],
)
def test_a_head_keeps_its_weights_when_those_of_the_model_change_and_sleep_reads_both_again(
    make_llm: MakeLLM, tmp_path: Path, kind: str, settings: dict[str, Any], own_embedding: bool
) -> None:
    """Before the update the head does not agree with the model, afterwards it does. Where it uses the model's embedding
    and output matrix, these are the new ones."""
    old, new = model(1.0), model(0.0)
    embedding = load_file(new / "model.safetensors")["model.embed_tokens.weight"] if own_embedding else None
    folder = agreeing_head(kind, tmp_path / "head", embedding=embedding)
    prompts, greedy = [draw(random.Random(i), 20 + i) for i in range(3)], SamplingParams(max_tokens=13, **GREEDY)
    expected = tokens(run(make_llm(model=new), prompts, greedy))
    count = 1 if kind == "parallel" else 3
    llm = make_llm(model=old, speculative_config=head_settings(folder, num_speculative_tokens=count), **settings)

    before = (0, 0)

    def rate() -> tuple[list[list[int]], float]:
        nonlocal before
        found, last = tokens(run(llm, prompts, greedy)), before
        before = acceptance(llm)
        drafted, accepted = gained(last, before)
        return found, accepted / drafted

    first, at_first = rate()
    assert at_first < 0.5
    llm.update_weights(tensors=tensors_of(new)) if kind == "eagle" else llm.update_weights(path=new)
    assert rate() == (expected, 1.0)
    llm.sleep(1)
    llm.wake_up()
    assert rate() == (expected, 1.0)
    llm.sleep(2)  # afterwards the weights are those of the start
    llm.wake_up()
    assert rate() == (first, at_first)


@pytest.mark.parametrize("method", ["eagle3", "parallel"])
def test_a_head_that_agrees_does_so_after_prefix_hits_of_every_length(make_llm: MakeLLM, method: str) -> None:
    shared, greedy = draw(random.Random(1), 64), SamplingParams(max_tokens=7, **GREEDY)
    prompts = [[*shared[:length], 7 + length % 3] for length in range(31, 50)]
    prompts += [shared[:length] for length in (16, 32, 33, 48, 49)]
    expected = tokens(run(make_llm(model=model(0.0)), prompts, greedy))
    count = 1 if method == "parallel" else 2
    llm = make_llm(model=model(0.0), speculative_config=speculative(method, count), async_scheduling=method != "eagle3")
    run(llm, [shared], SamplingParams(max_tokens=1, temperature=0))
    before = acceptance(llm)
    outputs = [run(llm, [prompt], greedy)[0] for prompt in prompts]
    assert tokens(outputs) == expected
    assert {output.num_cached_tokens for output in outputs} >= {0, 16, 32, 48}
    drafted, accepted = gained(before, acceptance(llm))
    assert accepted == drafted > 2 * len(prompts)


@pytest.mark.parametrize("method", methods("suffix", "eagle3"))
def test_log_probabilities_have_the_same_bits_in_invariant_batches(make_llm: MakeLLM, method: str) -> None:
    """Also with prefixes from host memory after sleep."""
    prompts = [draw(random.Random(i), 40 + i) for i in range(4)]
    greedy, found = SamplingParams(max_tokens=12, logprobs=1, presence_penalty=0.3, **GREEDY), []
    for settings in ({}, {"speculative_config": speculative(method), "kv_offloading_size": 0.01}):
        llm = make_llm(model=model(), batch_invariant=True, **settings)
        for i in range(3):
            if i == 2 and settings:
                llm.sleep(1)
                llm.wake_up()
            outputs = run(llm, prompts, greedy)
            found.append([(list(each.outputs[0].token_ids), each.outputs[0].logprobs) for each in outputs])
    assert all(each == found[0] for each in found)
    assert acceptance(llm)[1] > 0
    assert [output.num_cached_tokens for output in outputs] == [32] * 4


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_two_tensor_parallel_ranks_find_the_same_suffixes(make_llm: MakeLLM, ahead: bool) -> None:
    prompts, params = [draw(random.Random(i), 20) for i in range(6)], SamplingParams(max_tokens=30, **GREEDY)
    found = []
    for ranks in ({}, {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS}):
        llm = make_llm(model=model(), speculative_config=speculative("suffix", 6), async_scheduling=ahead, **ranks)
        for _ in range(2):
            found.append((tokens(run(llm, prompts, params)), acceptance(llm)))
    assert found[0] == found[2] and found[1] == found[3] and found[1][1][1] > 20


def test_replicas_with_suffixes_neither_double_nor_lose_a_token() -> None:
    settings = {"async_scheduling": True, "kv_cache_memory_bytes": TIGHT["kv_cache_memory_bytes"], "max_num_seqs": 3}
    check_streams_of_replicas(model(), 10, speculative_config=speculative("suffix"), data_parallel_size=2, **settings)


@pytest.mark.parametrize("method", methods("eagle3", "parallel"))
def test_padded_steps_have_the_same_drafts(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    prompts, params = [draw(random.Random(i), 5 + 9 * i) for i in range(5)], SamplingParams(max_tokens=40, **GREEDY)
    found = []
    for shapes in (None, BUCKETS):
        if shapes is not None:
            monkeypatch.setattr(Platform, "shapes", lambda self: BUCKETS)
        llm = make_llm(model=model(), speculative_config=speculative(method), max_num_batched_tokens=40)
        found.append((tokens(run(llm, prompts, params)), acceptance(llm)))
    assert found[0] == found[1] and found[0][1][1] > 0


@pytest.mark.parametrize("parallel", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_prompts_with_images_have_drafts(tmp_path: Path, parallel: bool) -> None:
    expected = multimodal_suite.oracle(FAMILIES[0])
    config: dict[str, Any] = {"vocab_size": MULTIMODAL_VOCAB, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    if parallel:
        config["ptd_token_id"] = 317
    settings = head_settings(write_eagle3(tmp_path / "head", **config))
    with multimodal_suite.engine(expected.folder, speculative_config=settings) as llm:
        prompts = [request.as_prompt() for request in expected.requests]
        params = SamplingParams(max_tokens=multimodal_suite.NUM_TOKENS, **GREEDY)
        for _ in range(2):
            multimodal_suite.check(expected, llm.generate(prompts, params, use_tqdm=False))
        assert acceptance(llm)[0] > 0


@pytest.mark.parametrize("method", methods(*METHODS))
def test_sampled_tokens_have_the_distribution_of_the_model(method: str) -> None:
    check_distribution(model(0.3), speculative(method, 2))
