"""A whole engine under random requests, rejections and aborts, with a cache that is too small for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mvllm import RequestError, SamplingParams
from mvllm.messages.sampling_params import RequestOutputKind
from tests.engine.conftest import MakeLLM
from tests.engine.test_async_scheduling import BLOCK_BYTES, TIGHT
from tests.helpers.model_zoo import VOCAB_SIZE
from tests.helpers.plugins import example_platform_path, prepend

NUM_REQUESTS = 300


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
    """Settings of an engine whose blocks arrive in host memory after the next step was launched, and stay on disk.

    Few requests run at once, so that blocks which the last step has saved are loaded by the next one.
    """
    prepend(monkeypatch, example_platform_path(folder / "plugins"))
    tiers = {"kv_offloading_size": 14 * BLOCK_BYTES / 2**30, "kv_disk_cache": str(folder / "kv")}
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    return {"platform": "example", "distributed_executor_backend": "mp", **tiers, **limits}


@pytest.mark.parametrize(("async_scheduling", "late"), [(False, False), (True, False), (True, True)])
def test_random_traffic_keeps_the_state_consistent_and_the_outputs_correct(
    make_llm: MakeLLM, async_scheduling: bool, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(11)
    llm = make_llm(
        **TIGHT,
        async_scheduling=async_scheduling,
        scheduling_policy="priority",
        **(late_exports(tmp_path, monkeypatch) if late else {"max_num_seqs": 6, "max_num_batched_tokens": 40}),
    )
    engine, scheduler = llm.llm_engine, llm.llm_engine._client._core.scheduler
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(150)]
    probes = [{"prompt_token_ids": shared[:length]} for length in (3, 40, 100)]
    settings = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in (0, 1, 0)]
    before = [output.outputs[0].token_ids for output in llm.generate(probes, settings, use_tqdm=False)]

    alive: set[str] = set()
    known: dict[str, Sequence[int]] = {}  # the tokens of probes among the requests
    num_requests = NUM_REQUESTS // 3 if late else NUM_REQUESTS
    num_added = num_steps = 0
    while num_added < num_requests or engine.has_unfinished_requests():
        while num_added < num_requests and len(alive) < rng.choice([1, 6, 16]):
            if late and rng.random() < 0.5:
                probe = rng.randrange(len(probes))
                engine.add_request(str(num_added), probes[probe], settings[probe])
                known[str(num_added)] = before[probe]
                alive.add(str(num_added))
                num_added += 1
                continue
            length = rng.choice([1, 15, 16, 17, 90, 150])
            own = rng.randrange(1, length + 1)
            ids = shared[: length - own] + [rng.randrange(2, VOCAB_SIZE) for _ in range(own)]
            with pytest.raises(RequestError):
                engine.add_request(str(num_added), {"prompt_token_ids": [*ids, VOCAB_SIZE]})
            salt = {"cache_salt": "s"} if rng.random() < 0.1 else {}
            prompt = {"prompt_token_ids": ids, **salt}
            engine.add_request(str(num_added), prompt, random_params(rng), priority=rng.randrange(-2, 3))
            alive.add(str(num_added))
            num_added += 1
        if rng.random() < 0.1 and alive:
            dropped = rng.choice(sorted(alive))
            engine.abort_request(dropped)
            alive.remove(dropped)
        for output in engine.step():
            assert output.request_id in alive
            if output.finished:
                alive.remove(output.request_id)
                assert {sequence.finish_reason for sequence in output.outputs} <= {"stop", "length"}
                assert known.get(output.request_id, output.outputs[0].token_ids) == output.outputs[0].token_ids
        num_steps += 1
        if num_steps % 10 == 0:
            scheduler.check_integrity()

    scheduler.check_integrity()
    stats = scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0) and not alive
    assert stats.num_preemptions > 0
    for _ in range(2):
        assert [o.outputs[0].token_ids for o in llm.generate(probes, settings, use_tqdm=False)] == before
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
