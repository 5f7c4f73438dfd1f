"""A whole engine under random requests, rejections and aborts of several threads, with drafts, and with a cache that is
too small for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mvllm import RequestError, SamplingParams
from mvllm.messages.sampling_params import RequestOutputKind
from tests.engine.conftest import MakeLLM
from tests.engine.test_async_scheduling import BLOCK_BYTES, TIGHT
from tests.engine.test_mtp import mtp, reference
from tests.engine.test_speculative import change_draft_lengths, spec_config
from tests.helpers.model_zoo import VOCAB_SIZE
from tests.helpers.plugins import example_platform_path, prepend, sqlite_connector_path
from tests.helpers.threads import run_in_threads

NUM_REQUESTS = 90
NUM_THREADS = 2
NUM_CALLS = 6
UNTIL_FULL = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def random_params(rng: random.Random) -> SamplingParams:
    several = rng.choice([1, 1, 2, 5])
    return SamplingParams(
        n=several,
        temperature=1.0 if several > 1 else rng.choice([0, 1.0]),
        max_tokens=rng.choice([1, 2, 8, 30, None]),
        ignore_eos=rng.random() < 0.5,
        stop=rng.choice([None, ["e"], ["zz", "a"]]),
        stop_token_ids=rng.choice([None, list(range(0, VOCAB_SIZE, 11))]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        output_kind=rng.choice(list(RequestOutputKind)),
    )


def late_exports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of an engine whose blocks arrive in host memory after the next step was launched, and stay in a file.

    Few requests run at once, so that blocks which the last step has saved are loaded by the next one.
    """
    prepend(monkeypatch, [*example_platform_path(folder / "plugins"), *sqlite_connector_path(folder / "plugins")])
    store = {"kv_connector": "sqlite", "kv_connector_extra_config": {"path": str(folder / "blocks.sqlite")}}
    tiers = {"kv_offloading_size": 14 * BLOCK_BYTES / 2**30, "kv_transfer_config": store}
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    return {"platform": "example", "distributed_executor_backend": "mp", **tiers, **limits}


@pytest.mark.parametrize(
    ("draft", "ahead", "late"),
    [
        (None, True, False),
        (None, True, True),
        ("ngram", False, False),
        pytest.param("near", False, False, marks=pytest.mark.exhaustive),
        pytest.param("ngram", True, False, marks=pytest.mark.exhaustive),
        pytest.param("near", True, False, marks=pytest.mark.exhaustive),
        ("mtp", True, False),
        pytest.param("mtp", False, False, marks=pytest.mark.exhaustive),
        pytest.param("hybrid mtp", True, False, marks=pytest.mark.exhaustive),
        ("ngram", True, True),
    ],
)
def test_random_traffic_keeps_the_state_consistent_and_the_outputs_correct(
    make_llm: MakeLLM, draft: str | None, ahead: bool, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"async_scheduling": ahead, **TIGHT}
    if draft is not None and "mtp" in draft:
        change_draft_lengths(monkeypatch)
        settings |= {"model": str(reference("qwen35moe" if "hybrid" in draft else "mimo", "near").folder), **mtp(3)}
    elif draft is not None:
        settings["speculative_config"] = spec_config(draft, 3)
    if draft not in (None, "ngram"):
        settings["kv_cache_memory_bytes"] *= 2  # two models
    if late:
        settings |= late_exports(tmp_path, monkeypatch)
    check_random_traffic(make_llm, settings, num_requests=NUM_REQUESTS // 2 if late else NUM_REQUESTS, late=late)


def check_random_traffic(
    make_llm: MakeLLM, settings: dict[str, Any], *, num_requests: int = NUM_REQUESTS, late: bool = False
) -> None:
    """One thread adds and aborts requests and runs steps, while others call `generate`.

    Args:
        settings: Of an engine whose cache is too small for them.
        num_requests: Requests of the first thread.
        late: Half of these are such whose tokens are known.
    """
    rng = random.Random(11)
    llm = make_llm(scheduling_policy="priority", **({"max_num_seqs": 6, "max_num_batched_tokens": 40} | settings))
    engine, scheduler = llm.llm_engine, llm.llm_engine._client._core.scheduler
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(150)]
    probes = [{"prompt_token_ids": shared[:length]} for length in (3, 40, 100)]
    known_params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in (0, 1, 0)]

    def answers() -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(probes, known_params, use_tqdm=False)]

    def random_prompt(rng: random.Random) -> list[int]:
        length = rng.choice([1, 15, 16, 17, 90, 150])
        own = rng.randrange(1, length + 1)
        return shared[: length - own] + [rng.randrange(2, VOCAB_SIZE) for _ in range(own)]

    def run_steps() -> None:
        alive = {f"long-{i}" for i in range(3)}  # more than the cache holds
        for request_id in alive:
            engine.add_request(request_id, {"prompt_token_ids": random_prompt(rng)[:20]}, UNTIL_FULL, priority=1)
        known: dict[str, Sequence[int]] = {}  # the tokens of probes among the requests
        num_added = num_steps = 0
        while num_added < num_requests or alive:
            while num_added < num_requests and len(alive) < rng.choice([1, 6, 16]):
                request_id, ids = f"mine-{num_added}", random_prompt(rng)
                if late and rng.random() < 0.5:
                    probe = rng.randrange(len(probes))
                    engine.add_request(request_id, probes[probe], known_params[probe])
                    known[request_id] = before[probe]
                    alive.add(request_id)
                    num_added += 1
                    continue
                with pytest.raises(RequestError):
                    engine.add_request(request_id, {"prompt_token_ids": [*ids, VOCAB_SIZE]})
                salt = {"cache_salt": "s"} if rng.random() < 0.1 else {}
                prompt = {"prompt_token_ids": ids, **salt}
                engine.add_request(request_id, prompt, random_params(rng), priority=rng.randrange(-2, 3))
                alive.add(request_id)
                num_added += 1
            if rng.random() < 0.1 and (short := sorted(name for name in alive if name.startswith("mine"))):
                dropped = rng.choice(short)
                engine.abort_request(dropped)
                alive.remove(dropped)
            for output in engine.step():
                assert output.request_id in alive
                if output.finished:
                    alive.remove(output.request_id)
                    assert {sequence.finish_reason for sequence in output.outputs} <= {"stop", "length"}
                    tokens = list(output.outputs[0].token_ids)
                    assert known.get(output.request_id, tokens) == tokens
            num_steps += 1
            if num_steps % 10 == 0:
                with engine._shared_steps.lock:
                    scheduler.check_integrity()

    def call(rng: random.Random) -> None:
        for _ in range(NUM_CALLS):
            prompts = [{"prompt_token_ids": random_prompt(rng)} for _ in range(rng.randrange(1, 4))]
            wanted = [random_params(rng) for _ in prompts]
            outputs = llm.generate(prompts, wanted, use_tqdm=False, priority=rng.randrange(-2, 3))
            assert [output.prompt_token_ids for output in outputs] == [each["prompt_token_ids"] for each in prompts]
            for output, params in zip(outputs, wanted, strict=True):
                assert output.finished and len(output.outputs) == params.n
                assert {sequence.finish_reason for sequence in output.outputs} <= {"stop", "length"}
            if rng.random() < 0.3:
                assert answers() == before

    before = answers()
    callers = [partial(call, random.Random(seed)) for seed in range(NUM_THREADS)]
    assert run_in_threads(run_steps, *callers) == [None] * (1 + NUM_THREADS)

    scheduler.check_integrity()
    stats = scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    assert not engine.has_unfinished_requests()
    assert stats.num_preemptions > 0 and (stats.num_accepted_tokens > 0) == ("speculative_config" in settings)
    for _ in range(2):
        assert answers() == before
        assert llm.reset_prefix_cache()


def test_requests_with_different_cache_salts_share_no_blocks(make_llm: MakeLLM) -> None:
    llm, params = make_llm(), SamplingParams(temperature=0, max_tokens=2)
    ids = list(range(20, 70))

    def num_cached(salt: str | None) -> int:
        prompt = {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})
        return llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens

    salts = [None, "a", "b", "a|b"]
    assert [num_cached(salt) for salt in salts] == [0, 0, 0, 0]
    assert [num_cached(salt) for salt in salts] == [48, 48, 48, 48]
