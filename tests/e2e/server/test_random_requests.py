"""Requests that nobody thought of: whatever a body holds, the answer is no fault of the server's; and nothing is left
of many requests, however they ended."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mvllm.entrypoints.openai import protocol
from tests.helpers.processes import shared_memory_names
from tests.helpers.server import ServerProcess, wait_idle

BODIES = {
    "/v1/completions": protocol.CompletionRequest,
    "/v1/chat/completions": protocol.ChatCompletionRequest,
    "/tokenize": protocol.TokenizeRequest,
    "/detokenize": protocol.DetokenizeRequest,
}
NUMBERS = st.integers(-(2**64), 2**64) | st.integers(-3, 30) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(st.characters(codec="utf-8"), max_size=20)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("demo"),
    "prompt": st.text(max_size=30) | st.lists(st.integers(-1, 5000), max_size=5) | st.lists(st.text(max_size=5)),
    "messages": st.lists(st.fixed_dictionaries({"role": st.text(max_size=9), "content": ANYTHING}), max_size=3),
    "max_tokens": st.integers(-1, 5),
    "max_completion_tokens": st.integers(-1, 5),
    "n": st.integers(0, 4),
    "logprobs": st.integers(-1, 22) | st.booleans(),
    "tokens": st.lists(st.integers(-1, 5000), max_size=5),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(BODIES)))
    names = [name for name in BODIES[path].__struct_fields__ if name != "model"]
    body: dict[str, Any] = {"max_tokens": 3} if "max_tokens" in names else {}
    for name in {"prompt", "messages", "tokens"} & set(names):
        body[name] = draw(LIKELY[name])
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        body[name] = draw(LIKELY.get(name, ANYTHING) | ANYTHING)
    return path, body


@pytest.fixture(autouse=True)
def works_as_before(server: ServerProcess, client: httpx.Client) -> Iterator[None]:
    before = server.pids()
    yield
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert server.pids() == before


def check(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404), (path, body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
    elif body.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
    else:
        answer.json()


_CHECKS = {"suppress_health_check": list(HealthCheck), "deadline": None}


@settings(max_examples=150, **_CHECKS)
@given(request=requests())
def test_no_body_is_the_servers_fault(client: httpx.Client, request: tuple[str, dict[str, Any]]) -> None:
    check(client, *request)


@pytest.mark.exhaustive
@settings(max_examples=5000, **_CHECKS)
@given(request=requests())
def test_no_body_of_many_is_the_servers_fault(client: httpx.Client, request: tuple[str, dict[str, Any]]) -> None:
    check(client, *request)


class Tally:
    """How requests ended. An answer counts for the request whose prompt it repeats, and for one alone."""

    def __init__(self) -> None:
        self.ended = {"answered": 0, "refused": 0, "left": 0}
        self.ids: set[str] = set()
        self.num_sequences = 0

    def answered(self, prompt: str, body: dict[str, Any], answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text
        pieces = [answer.json()] if not body["stream"] else _events(answer.text)
        [answer_id] = {piece["id"] for piece in pieces}
        assert answer_id not in self.ids
        self.ids.add(answer_id)
        for index in range(body["n"]):
            choices = [choice for piece in pieces for choice in piece["choices"] if choice["index"] == index]
            assert "".join(choice["text"] for choice in choices).startswith(prompt)
            assert [choice["finish_reason"] in ("stop", "length") for choice in choices if choice["finish_reason"]] == [
                True
            ]
        assert {choice["index"] for piece in pieces for choice in piece["choices"]} == set(range(body["n"]))
        self.ended["answered"] += 1
        self.num_sequences += body["n"]


def _events(text: str) -> list[dict[str, Any]]:
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]", text[-200:]
    return [json.loads(event) for event in events]


async def traffic(url: str, num_requests: int, at_once: int, seed: int) -> Tally:
    """Random requests, good and bad, read to their end or left."""
    rng = random.Random(seed)
    tally = Tally()
    limit = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:

        async def one(number: int, kind: float, seconds: float, stream: bool, max_tokens: int) -> None:
            prompt = f"Story {seed}-{number}: once upon a time"
            body: dict[str, Any] = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "n": 1, "stream": stream}
            async with limit:
                if kind < 0.1:
                    answer = await client.post("/v1/completions", json={**body, "temperature": -1})
                    assert answer.status_code == 400
                    tally.ended["refused"] += 1
                elif kind < 0.3:
                    body = {**body, "max_tokens": 900, "ignore_eos": True, "n": 2}
                    try:
                        async with asyncio.timeout(seconds):
                            answer = await client.post("/v1/completions", json=body)
                    except TimeoutError:
                        tally.ended["left"] += 1
                    else:
                        tally.answered(prompt, body, answer)
                else:
                    tally.answered(prompt, body, await client.post("/v1/completions", json=body))

        tasks = [
            one(i, rng.random(), rng.random() * 0.3, rng.random() < 0.5, rng.choice((1, 8, 40)))
            for i in range(num_requests)
        ]
        await asyncio.gather(*tasks)
    return tally


async def streams_together(url: str, at_once: int) -> None:
    """Streams that are all open at the same time; half of them are read to the end, half are left."""
    body = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "stream": True}
    limits = httpx.Limits(max_connections=at_once + 1)
    all_open = asyncio.Barrier(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:

        async def one(is_left: bool) -> None:
            long = {**body, "max_tokens": 900} if is_left else body
            async with client.stream("POST", "/v1/completions", json=long) as answer:
                assert answer.status_code == 200
                pieces = answer.aiter_text()
                text = await anext(pieces)
                await all_open.wait()
                if not is_left:
                    last = _events(text + "".join([piece async for piece in pieces]))[-1]
                    assert last["choices"][0]["finish_reason"] == "length"

        await asyncio.gather(*(one(i % 2 == 0) for i in range(at_once)))


def ends(client: httpx.Client) -> dict[str, float]:
    """Sequences that have ended, by the reason."""
    pattern = r'^mvllm:request_success_total\{.*finished_reason="(\w+)".*\} (\S+)$'
    return {reason: float(count) for reason, count in re.findall(pattern, client.get("/metrics").text, re.MULTILINE)}


def use_every_block(client: httpx.Client) -> None:
    """Prompts of random tokens, more than the KV cache holds: a fresh cache has no memory where nothing was written."""
    [facts] = re.findall(r"^mvllm:cache_config_info\{(.*)\}", client.get("/metrics").text, re.MULTILINE)
    size, number = (int(re.findall(rf'{name}="(\d+)"', facts)[0]) for name in ("block_size", "num_blocks"))
    rng = random.Random(0)
    for _ in range(1 + size * number // (900 * 32)):
        prompts = [[rng.randrange(5, 2000) for _ in range(900)] for _ in range(32)]
        assert client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1}).status_code == 200


def use_every_shape(client: httpx.Client) -> None:
    """Steps of each number of rows up to 64: a platform may keep something for each shape that it has seen."""
    for n in range(1, 65):
        ask = {"prompt": "Once", "n": n, "max_tokens": 2, "ignore_eos": True}
        assert client.post("/v1/completions", json=ask).status_code == 200


def soak(server: ServerProcess, client: httpx.Client, num_requests: int, at_once: int) -> None:
    """Warms up, takes stock, lets the traffic pass, and takes stock again."""
    me = psutil.Process(server.process.pid)
    processes = [me, server.engine_core()]

    def stock() -> dict[str, Any]:
        wait_idle(client)
        text = client.get("/metrics").text
        lines = text.splitlines()
        used = [float(line.split()[-1]) for line in lines if line.startswith("mvllm:kv_cache_usage_perc{")]
        return {
            "files": [p.num_fds() for p in processes],
            "threads": [p.num_threads() for p in processes],
            "series": sum(not line.startswith("#") and "http_re" not in line for line in lines),
            "KV cache in use": used,
            "shared memory": {name for name in shared_memory_names() if "mvllm" in name},
            "processes": server.pids(),
        }

    def memory() -> list[int]:
        """Bytes, once they no longer grow."""
        found = [p.memory_info().rss for p in processes]
        for _ in range(30):
            time.sleep(1)
            last, found = found, [p.memory_info().rss for p in processes]
            if max(now - was for was, now in zip(last, found, strict=True)) < 1 << 20:
                break
        return found

    use_every_block(client)
    use_every_shape(client)
    asyncio.run(traffic(server.url, min(num_requests, 400), at_once, seed=1))
    asyncio.run(streams_together(server.url, at_once))
    before, bytes_before, ends_before = stock(), memory(), ends(client)
    started = time.monotonic()
    asyncio.run(streams_together(server.url, at_once))
    between = ends(client)
    tally = asyncio.run(traffic(server.url, num_requests, at_once, seed=2))
    seconds = time.monotonic() - started
    after, bytes_after, ends_after = stock(), memory(), ends(client)
    print(f"\n{num_requests} requests, {at_once} at once, in {seconds:.0f} s: {tally.ended}; ends {ends_after}")
    print(f"before {before}\nafter  {after}\nresident bytes before {bytes_before}, after {bytes_after}")
    assert sum(tally.ended.values()) == num_requests and all(tally.ended.values()), tally.ended
    # Every sequence that was asked for ended once in the engine: those of answers, and of who left two at most each.
    assert ends_after["error"] == ends_before["error"]
    num_ended = sum(ends_after.values()) - sum(between.values())
    assert tally.num_sequences <= num_ended <= tally.num_sequences + 2 * tally.ended["left"] + at_once
    for name in ("files", "threads"):
        for was, now in zip(before[name], after[name], strict=True):
            assert now <= was + 3, (before, after)
    for name in ("series", "shared memory", "processes"):
        assert after[name] == before[name], (before, after)
    assert after["KV cache in use"] and not any(after["KV cache in use"])
    for was, now in zip(bytes_before, bytes_after, strict=True):
        assert now < was + (48 << 20), (bytes_before, bytes_after)


def test_nothing_is_left_of_300_requests(server: ServerProcess, client: httpx.Client) -> None:
    soak(server, client, 300, 40)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_nothing_is_left_of_20000_requests(server: ServerProcess, client: httpx.Client) -> None:
    soak(server, client, 20_000, 200)
