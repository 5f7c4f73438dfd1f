"""On a device with late results: steps are launched without waiting for tokens, and the tokens are the same."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mvllm import LLM, PoolingParams, SamplingParams
from mvllm.config.engine_args import EngineArgs
from mvllm.engine.core.config_resolution import resolve_config
from mvllm.engine.core.engine_core import EngineCore
from mvllm.errors import EngineDeadError
from mvllm.messages.pooling_params import PoolingType
from mvllm.messages.requests import EngineCoreRequest
from mvllm.platform.choose import choose_platform
from tests.engine.test_async_scheduling import BLOCK_BYTES, TIGHT, requests, visible_outputs
from tests.engine.test_speculative import NGRAM
from tests.helpers import parity
from tests.helpers.late_plugin import LOG, read_log
from tests.helpers.model_zoo import VOCAB_SIZE
from tests.helpers.plugins import late_platform_path, prepend, sqlite_connector_path
from tests.helpers.processes import TAG, assert_nothing_left, new_tag, shared_memory_names

EXECUTORS = {
    "uni": {},
    "mp": {"distributed_executor_backend": "mp"},
    "mp-tp2": {"distributed_executor_backend": "mp", "tensor_parallel_size": 2},
    "mp-pp2": {
        "distributed_executor_backend": "mp",
        "pipeline_parallel_size": 2,
    },  # tokens are transferred through the host
}

IN_BOTH = pytest.mark.parametrize("executor", ["uni", pytest.param("mp-tp2", marks=pytest.mark.exhaustive)])

MakeLLM = Callable[..., LLM]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def make(checkpoint: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLLM]:
    prepend(monkeypatch, late_platform_path(tmp_path / "plugins"))
    monkeypatch.setenv(LOG, str(log))
    tag = new_tag()
    monkeypatch.setenv(TAG, tag)
    before = shared_memory_names()
    with ExitStack() as stack:

        def build(executor: str = "uni", faults: str = "none", **settings: Any) -> LLM:
            monkeypatch.setenv("FAULT_INJECTION", faults)
            log.write_text("")
            given: dict[str, Any] = {"platform": "late", "async_scheduling": True, **EXECUTORS[executor], **settings}
            return stack.enter_context(parity.engine(given.pop("model", checkpoint), **given))

        yield build
    assert_nothing_left(tag, before)


def generate(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": [5 + i, 6, 7, 8]} for i in range(len(params))]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def events_of(llm: LLM, log: Path) -> dict[int, list[tuple[str, int]]]:
    """Events of each rank, after all ranks have ended: the caller gets its tokens before the other ranks finish."""
    llm.llm_engine.shutdown()
    return read_log(log)


def waits_before_launch(events: list[tuple[str, int]]) -> list[int]:
    """Steps whose tokens were waited for before the next step was launched."""
    at = {event: i for i, event in reversed(list(enumerate(events)))}
    steps = [step for event, step in events if event == "launched"]
    return [step for step in steps[:-1] if at["waited", step] < at["launched", step + 1]]


@pytest.mark.parametrize(
    "executor", [*(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("uni", "mp")), "mp-tp2"]
)
def test_a_step_is_launched_before_the_tokens_of_the_last_are_waited_for(
    make: MakeLLM, log: Path, executor: str
) -> None:
    llm = make(executor)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "top_k": 9},
        {"seed": 3, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 0, "min_tokens": 9, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"seed": 4, "n": 2, "frequency_penalty": 0.7, "presence_penalty": -0.3},
    ]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, **kind) for kind in kinds]
    tokens = generate(llm, params)
    logs = events_of(llm, log)
    assert len(logs) == EXECUTORS[executor].get("tensor_parallel_size", 1)
    for events in logs.values():
        assert [step for event, step in events if event == "launched"] == list(range(20))
        assert {step for event, step in events if event == "waited"} == set(range(20))
        assert waits_before_launch(events) == []
    assert generate(make(async_scheduling=False), params) == tokens


@pytest.mark.parametrize("executor", ["mp", pytest.param("mp-tp2", marks=pytest.mark.exhaustive)])
def test_with_drafts_each_step_reads_its_tokens(make: MakeLLM, executor: str) -> None:
    params = [SamplingParams(max_tokens=30, ignore_eos=True, temperature=i % 2, seed=i) for i in range(6)]
    llm = make(executor, async_scheduling=None, speculative_config=NGRAM)
    assert llm.llm_engine.config.scheduler.async_scheduling is True
    assert generate(llm, params) == generate(make(async_scheduling=False), params)
    assert llm.llm_engine.stats is not None and llm.llm_engine.stats.num_accepted_tokens > 0


@IN_BOTH
def test_grammar_masks_arrive_while_the_device_computes(make: MakeLLM, log: Path, executor: str) -> None:
    """A step with a grammar runs before the previous tokens are read, and samples when its masks are ready."""
    llm = make(executor, model="demo")
    params = [
        SamplingParams(seed=1, max_tokens=20, structured_outputs={"regex": "[a-f0-9]{400}"}),
        SamplingParams(seed=2, max_tokens=9, structured_outputs={"choice": ["a", "b"]}),
        SamplingParams(seed=3, max_tokens=20, ignore_eos=True),
    ]
    generate(llm, params)
    log.write_text("")
    tokens = generate(llm, params)
    for events in events_of(llm, log).values():
        began = sorted({step for event, step in events if event == "began"})
        assert len(began) == 20
        assert all(events.index(("began", step + 1)) < events.index(("waited", step)) for step in began[:-1])
    assert generate(make(model="demo", async_scheduling=False), params) == tokens


@IN_BOTH
def test_only_a_batch_that_reads_tokens_waits_and_does_so_while_the_device_computes(
    make: MakeLLM, log: Path, executor: str
) -> None:
    llm = make(executor)
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, repetition_penalty=1.5, bad_words=["a b", "c d"]),
    ]
    tokens = generate(llm, params)
    for events in events_of(llm, log).values():
        assert waits_before_launch(events) == [0, 1, 2, 3], "the request with bad words samples in steps 0 to 4"
        for step in range(4):
            assert events.index(("submitted", step + 1)) < events.index(("waited", step))
    assert generate(make(async_scheduling=False), params) == tokens


@pytest.mark.parametrize(
    ("executor", "settings"),
    [
        pytest.param("uni", {"max_num_batched_tokens": 17}, marks=pytest.mark.exhaustive),
        pytest.param("uni", {"max_num_seqs": 1, "max_num_batched_tokens": 16}, marks=pytest.mark.exhaustive),
        pytest.param("uni", {**TIGHT, "enable_chunked_prefill": False}, marks=pytest.mark.exhaustive),
        ("uni", {"max_num_batched_tokens": 33, "scheduling_policy": "priority", **TIGHT}),
        pytest.param("mp-tp2", {"max_num_batched_tokens": 33, **TIGHT}, marks=pytest.mark.exhaustive),
        pytest.param("mp-pp2", {"max_num_batched_tokens": 33}, marks=pytest.mark.exhaustive),
    ],
)
def test_asynchronous_tokens_equal_synchronous_ones(make: MakeLLM, executor: str, settings: dict[str, Any]) -> None:
    prompts, params = requests(seed=5)
    if executor != "uni":  # one request of each kind: every all-reduce of the ranks takes a millisecond
        prompts, params = prompts[-7:], params[-7:]
    else:
        prompts, params = prompts[1::2], params[1::2]
    settings = {"max_model_len": 112, **settings}  # some requests run until this length
    plain = make(async_scheduling=False, max_model_len=112)
    expected = [visible_outputs(output) for output in plain.generate(prompts, params, use_tqdm=False)]
    if "tensor_parallel_size" in EXECUTORS[executor] and "kv_cache_memory_bytes" in settings:
        settings = {**settings, "kv_cache_memory_bytes": settings["kv_cache_memory_bytes"] // 2}  # half of it per rank
    llm = make(executor, **settings)
    for _ in range(2):  # the second time with prefixes in the cache
        assert [visible_outputs(output) for output in llm.generate(prompts, params, use_tqdm=False)] == expected
    stats = llm.llm_engine.stats
    assert stats is not None and (stats.num_preemptions > 0) == ("kv_cache_memory_bytes" in settings)
    assert stats.prefix_cache_hits > 0


@IN_BOTH
def test_tokens_and_log_probabilities_are_those_of_transformers(make: MakeLLM, executor: str) -> None:
    expected = parity.oracle("llama-gqa", (0, 3, 5, 6, 8, 9, 11, 15), 24)  # 1 to 97 tokens; some share prefixes
    llm = make(executor, model=expected.folder, max_num_seqs=5, max_num_batched_tokens=32)
    parity.check(expected, parity.generate(llm, expected.prompts, max_tokens=24))
    again = parity.generate(llm, expected.prompts[:4], max_tokens=24, prompt_logprobs=2)
    parity.check(expected, again)
    parity.check_prompt_logprobs(expected, again)


def test_tokens_with_a_repetition_penalty_are_those_of_transformers(make: MakeLLM) -> None:
    folder, penalty, num_tokens = parity.make_checkpoint("llama-gqa", Path(tempfile.mkdtemp()) / "model"), 1.4, 24
    prompts = parity.prompts_of("llama-gqa", (1, 3, 5))
    reference, expected = parity.load_reference(folder), []
    for prompt in prompts:
        settings = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        ids = reference.generate(torch.tensor([prompt]), repetition_penalty=penalty, **settings)
        expected.append(ids[0, len(prompt) :].tolist())
    llm = make(model=folder, max_num_batched_tokens=32)
    outputs = parity.generate(llm, prompts, repetition_penalty=penalty, max_tokens=num_tokens)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@IN_BOTH
def test_a_row_is_reused_while_its_last_token_is_on_the_device(make: MakeLLM, executor: str) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    penalized = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, presence_penalty=2.0)
    wanted = {"prompt_token_ids": [30, 31]}
    fresh = make(async_scheduling=False, max_num_seqs=1)
    expected = [fresh.generate(wanted, p, use_tqdm=False)[0].outputs[0].token_ids for p in (greedy, penalized)]
    llm = make(executor, max_num_seqs=1)
    engine = llm.llm_engine
    for i, params in enumerate((greedy, penalized)):
        # Aborted with a step under way that samples for the only row; the next request samples at the same position.
        engine.add_request(f"dropped-{i}", {"prompt_token_ids": [7]}, greedy)
        engine.step()
        engine.abort_request(f"dropped-{i}")
        assert llm.generate(wanted, params, use_tqdm=False)[0].outputs[0].token_ids == expected[i]
    assert engine.stats is not None and engine.stats.kv_cache_usage == 0


@IN_BOTH
def test_a_request_with_nan_logits_ends_with_an_error_and_the_engine_goes_on(make: MakeLLM, executor: str) -> None:
    llm = make(executor, "nan@execute:rank=-1,step=3")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    [failed] = llm.generate(prompt, params, use_tqdm=False, raise_on_error=False)
    assert failed.outputs[0].finish_reason == "error"
    assert len(failed.outputs[0].token_ids) == 3
    [good] = llm.generate(prompt, params, use_tqdm=False)
    assert good.outputs[0].token_ids[:3] == failed.outputs[0].token_ids
    assert good.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(None, id="free", marks=pytest.mark.exhaustive),
        pytest.param({"regex": "[a-z]{90}"}, id="masks follow"),
    ],
)
def test_a_step_without_memory_fails_its_requests_while_the_next_is_in_flight(
    make: MakeLLM, form: dict[str, str] | None
) -> None:
    llm = make("uni", "oom@execute:step=3")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, structured_outputs=form)
    prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8, 9]}]
    failed = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False, raise_on_error=False)]
    assert [(each.finish_reason, len(each.token_ids)) for each in failed] == [("error", 3)] * 2
    good = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    for one, other in zip(good, failed, strict=True):
        assert one.finish_reason == "length" and one.token_ids[:3] == other.token_ids
    assert llm.llm_engine.stats is not None and llm.llm_engine.stats.kv_cache_usage == 0


def test_requests_that_share_blocks_of_a_failed_step_give_correct_tokens(
    make: MakeLLM,
) -> None:
    """A step of 48 tokens is one prompt; the next prompt shares all but the last block, and is planned before the
    failure.
    """
    shared = [7 + i % 50 for i in range(47)]
    prompts = [{"prompt_token_ids": [*shared, *range(100 + i, 101 + 9 * i)]} for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def run(llm: LLM) -> list[tuple[object, list[int]]]:
        found = llm.generate(prompts, params, use_tqdm=False, raise_on_error=False)
        outputs = [output.outputs[0] for output in found]
        return [(each.finish_reason, list(each.token_ids)) for each in outputs]

    expected = run(make("uni", max_num_batched_tokens=48))
    llm = make("uni", "oom@execute:step=0", max_num_batched_tokens=48)
    assert run(llm) == [("error", []), *expected[1:]]
    assert run(llm) == expected, "on what the cache holds now"


@pytest.mark.parametrize("executor", ["mp-tp2"])
def test_a_step_that_raises_after_an_unread_step_ends_the_engine_with_its_error(make: MakeLLM, executor: str) -> None:
    llm = make(executor, "raise@execute:rank=0,step=3")
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"execute_model of step 3: .*InjectedFault"):
            generate(llm, [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)])


@pytest.mark.parametrize("executor", ["mp-tp2"])
def test_other_calls_are_allowed_while_sampled_tokens_are_unread(
    make: MakeLLM, checkpoint: Path, executor: str
) -> None:
    expected = generate(make(), [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)])[0]
    args = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 22, "dtype": "float32", "use_tqdm_on_load": False}
    config = EngineArgs.from_kwargs(
        model=str(checkpoint), platform="late", async_scheduling=True, **EXECUTORS[executor], **args
    ).create_engine_config()
    platform = choose_platform("late").platform
    core = EngineCore(resolve_config(config, platform), platform)
    try:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        core.add_request(EngineCoreRequest(request_id="r", prompt_token_ids=[5, 6, 7, 8], sampling_params=params))
        found: list[int] = []
        while core.has_requests():
            for output in core.step().outputs:
                found += output.new_token_ids
            core.check_health()
        assert found == expected
    finally:
        core.shutdown()


def test_pooled_vectors_are_read_late_like_tokens(make: MakeLLM, checkpoint: Path) -> None:
    prompts = [[5 + i % 40 for i in range(length)] for length in (90, 3, 31, 50)]
    with parity.engine(checkpoint, platform="cpu") as prompt_engine:
        expected = {kind: prompt_engine.encode(prompts, PoolingParams(pooling_type=kind)) for kind in PoolingType}
    llm = make(max_num_batched_tokens=32)
    for kind, wanted in expected.items():
        found = llm.encode(prompts, PoolingParams(pooling_type=kind), use_tqdm=False)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one.outputs.data, other.outputs.data, atol=1e-5)


@pytest.mark.parametrize(
    "executor", ["uni", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("mp", "mp-tp2"))]
)
def test_a_step_loads_blocks_that_the_step_before_it_saves(
    make: MakeLLM, tmp_path: Path, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported blocks arrive when their copies are waited for. So few blocks are cached on the device and in host
    memory that some are saved when they are evicted, and loaded by the next plan."""
    rng = random.Random(2)

    def draw(length: int) -> list[int]:
        return [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]

    shared, prompts = [draw(97) for _ in range(3)], []
    for _ in range(40):
        length = rng.choice([33, 50, 81])
        start = rng.choice(shared)[:length] if rng.random() < 0.6 else draw(length)
        prompts.append({"prompt_token_ids": [*start, *draw(1)]})
    params = [SamplingParams(temperature=0, max_tokens=rng.choice([1, 1, 1, 9]), ignore_eos=True) for _ in prompts]

    def tokens(llm: LLM) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    expected = tokens(make(async_scheduling=False))
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 64, **TIGHT}
    settings |= {"kv_offloading_size": 14 * BLOCK_BYTES / 2**30}
    prepend(monkeypatch, sqlite_connector_path(tmp_path / "plugins"))
    store = {"kv_connector": "sqlite", "kv_connector_extra_config": {"path": str(tmp_path / "blocks.sqlite")}}
    for role in ("producer", "both"):  # the second engine finds what the first one has stored
        llm = make(executor, **settings, kv_transfer_config={**store, "kv_role": role})
        for _ in range(2):
            assert tokens(llm) == expected
        core = llm.llm_engine._client._core  # type: ignore[attr-defined]
        tiers = core.make_stats().kv_tiers
        assert tiers["host"].num_loaded > 0 and tiers["host"].num_saved > 0
        core.scheduler.check_integrity()
        llm.llm_engine.shutdown()
