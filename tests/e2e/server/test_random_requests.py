"""Random request bodies: no body causes a 500, and no state is left after many requests, however they ended."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from hypothesis import HealthCheck, given, settings

from mvllm import LLM, SamplingParams
from mvllm.entrypoints.openai import protocol
from tests.engine.test_mtp import reference
from tests.helpers.processes import wait_until
from tests.helpers.random_bodies import random_requests
from tests.helpers.server import SMALL, ServerProcess, settled_pids, wait_idle

BODIES = {
    "/v1/completions": protocol.CompletionRequest,
    "/v1/chat/completions": protocol.ChatCompletionRequest,
    "/tokenize": protocol.TokenizeRequest,
    "/detokenize": protocol.DetokenizeRequest,
}
REQUESTS = random_requests(BODIES)


@pytest.fixture(autouse=True)
def works_as_before(server: ServerProcess, client: httpx2.Client) -> Iterator[None]:
    before = settled_pids(server)
    yield
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    wait_until(lambda: server.pids() == before, 120, "the same processes run")


def check(client: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404), (path, body, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif body.get("stream") and path in ("/v1/completions", "/v1/chat/completions"):
        assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
    else:
        answer.json()


_CHECKS = {"suppress_health_check": list(HealthCheck), "deadline": None}


@settings(max_examples=150, **_CHECKS)
@given(request=REQUESTS)
def test_no_random_body_causes_a_500(client: httpx2.Client, request: tuple[str, dict[str, Any]]) -> None:
    check(client, *request)


@pytest.mark.exhaustive
@settings(max_examples=5000, **_CHECKS)
@given(request=REQUESTS)
def test_none_of_many_random_bodies_causes_a_500(client: httpx2.Client, request: tuple[str, dict[str, Any]]) -> None:
    check(client, *request)


async def traffic(url: str, num_requests: int, at_once: int, seed: int) -> dict[str, int]:
    """Random valid and invalid requests, read to their end or disconnected; returns how many of each kind ended."""
    rng = random.Random(seed)
    ended = {"answered": 0, "refused": 0, "left": 0}
    limit = asyncio.Semaphore(at_once)
    # Connections expire here before the server closes them: a request on a connection that is being closed is lost.
    limits = httpx2.Limits(max_connections=at_once, max_keepalive_connections=at_once, keepalive_expiry=1)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:

        async def one(kind: float, seconds: float, stream: bool) -> None:
            body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": rng.choice((1, 8, 40)), "n": 1}
            async with limit:
                if kind < 0.1:
                    answer = await client.post("/v1/completions", json={**body, "temperature": -1})
                    assert answer.status_code == 400
                    ended["refused"] += 1
                elif kind < 0.3:
                    try:
                        async with asyncio.timeout(seconds):
                            long = {**body, "max_tokens": 900, "ignore_eos": True, "n": 2, "stream": stream}
                            await client.post("/v1/completions", json=long)
                        ended["answered"] += 1
                    except TimeoutError:
                        ended["left"] += 1
                else:
                    answer = await client.post("/v1/completions", json={**body, "stream": stream})
                    assert answer.status_code == 200
                    done = answer.text.count("data: [DONE]") if stream else len(answer.json()["choices"])
                    assert done == 1
                    ended["answered"] += 1

        await asyncio.gather(*(one(rng.random(), rng.random() * 0.3, rng.random() < 0.5) for _ in range(num_requests)))
    return ended


def check_resources(server: ServerProcess, client: httpx2.Client, num_requests: int, at_once: int) -> None:
    """Warms up, records the server's resources, runs the traffic, and compares the resources."""
    me = psutil.Process(server.process.pid)
    processes = [me, server.engine_core()]

    def resources() -> tuple[list[int], list[int], int]:
        gc.collect()  # httpx2 closes connections of cancelled requests with their objects; the server has their ends
        wait_idle(client)
        time.sleep(1)
        lines = client.get("/metrics").text.splitlines()
        series = sum(not line.startswith("#") and "http_re" not in line for line in lines)
        return [p.num_fds() for p in processes], [p.num_threads() for p in processes], series

    def memory() -> list[int]:
        """Resident bytes, once they no longer grow: an idle core still touches the pages of a new KV cache."""
        found = [p.memory_info().rss for p in processes]
        for _ in range(30):
            time.sleep(1)
            last, found = found, [p.memory_info().rss for p in processes]
            if max(now - was for was, now in zip(last, found, strict=True)) < 1 << 20:
                break
        return found

    asyncio.run(traffic(server.url, min(num_requests, 400), at_once, seed=1))
    before, bytes_before = resources(), memory()
    ended = asyncio.run(traffic(server.url, num_requests, at_once, seed=2))
    assert sum(ended.values()) == num_requests and all(ended.values()), ended
    after = resources()
    for was, now in zip(before[0] + before[1], after[0] + after[1], strict=True):
        assert now <= was + 3, (before, after)
    assert after[2] == before[2]
    for was, now in zip(bytes_before, memory(), strict=True):
        assert now < was + (48 << 20)
    metrics = client.get("/metrics").text
    assert "\nmvllm:kv_cache_usage_perc" in metrics
    assert all(float(line.split()[-1]) == 0 for line in metrics.splitlines() if "kv_cache_usage_perc{" in line)


def test_no_state_is_left_after_300_requests(server: ServerProcess, client: httpx2.Client) -> None:
    check_resources(server, client, 300, 40)


@pytest.mark.parametrize("method", [pytest.param("ngram", marks=pytest.mark.exhaustive), "mtp"])
def test_texts_are_whole_with_drafts_planned_ahead(tmp_path: Path, method: str) -> None:
    """Greedy texts, streamed or not, with grammars among them, are those without drafts, while other requests come, end
    and are disconnected."""
    model = "demo" if method == "ngram" else str(reference("mimo", "near").folder)
    longer: dict[str, Any] = {} if method == "ngram" else {"max_position_embeddings": 1024}
    prompts = [f"Once upon a time there was a {name}. There was a" for name in ("fox", "king", "cat", "ship")]
    free: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    formed = {"max_tokens": 60, "temperature": 0, "structured_outputs": {"regex": "[a-z ]{20,30}[.]"}}
    asked = [(prompt, each) for prompt in prompts for each in (free, formed)]
    with LLM(model, batch_invariant=True, kv_cache_memory_bytes=64 << 20, dtype="float32", hf_overrides=longer) as llm:
        sampling = [SamplingParams(**each) for _, each in asked]
        outputs = llm.generate([prompt for prompt, _ in asked], sampling, use_tqdm=False)
        expected = [output.outputs[0].text for output in outputs]
    assert all(text.endswith(".") for text in expected[1::2])
    drafts = {"method": method, "num_speculative_tokens": 4} | ({"prompt_lookup_min": 1} if method == "ngram" else {})
    options = ["--port", "0", *SMALL, "--batch-invariant", "--async-scheduling", "--dtype", "float32"]
    options += ["--speculative-config", json.dumps(drafts), "--hf-overrides", json.dumps(longer)]

    async def text(client: httpx2.AsyncClient, prompt: str, settings: dict[str, Any], stream: bool) -> str:
        answer = await client.post("/v1/completions", json={"prompt": prompt, **settings, "stream": stream})
        if not stream:
            whole: str = answer.json()["choices"][0]["text"]
            return whole
        assert answer.text.endswith("data: [DONE]\n\n")
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])

    async def among_others(url: str) -> None:
        others = asyncio.create_task(traffic(url, 80, 12, seed=3))
        async with httpx2.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
            for number in itertools.count():
                streams = [(i + number) % 4 > 0 for i in range(len(asked))]
                found = await asyncio.gather(*(text(client, *each, s) for each, s in zip(asked, streams, strict=True)))
                assert found == expected
                if others.done():
                    break
        assert all((await others).values())

    with ServerProcess(tmp_path, model, *options) as server:
        asyncio.run(among_others(server.wait_ready().url))
        with server.client() as own:
            wait_idle(own)
            metrics = own.get("/metrics").text
    accepted = [line for line in metrics.splitlines() if line.startswith("mvllm:spec_decode_num_accepted_tokens_total")]
    assert accepted and float(accepted[0].split()[-1]) > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_no_state_is_left_after_20000_requests(server: ServerProcess, client: httpx2.Client) -> None:
    check_resources(server, client, 20_000, 200)
