"""Sampling fields over HTTP: logit bias, ranked outputs, truncated prompts."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.helpers.server import ServerProcess, wait_idle

PATH = "/v1/completions"
STORY = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}


def choices(client: httpx2.Client, path: str = PATH, **ask: Any) -> list[dict[str, Any]]:
    answer = client.post(path, json={**(CHAT if "chat" in path else STORY), **ask})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    assert [choice["index"] for choice in found] == list(range(len(found)))
    return found


def test_logit_bias_allowed_tokens_and_bad_words(client: httpx2.Client) -> None:
    [free] = choices(client, return_token_ids=True)
    first, second = free["token_ids"][0], free["token_ids"][1]
    [biased] = choices(client, return_token_ids=True, logit_bias={str(second): 100})
    assert biased["token_ids"] == [second] * 8
    [allowed] = choices(client, return_token_ids=True, allowed_token_ids=[first, second], temperature=1.0, seed=3)
    assert set(allowed["token_ids"]) <= {first, second}
    word = free["text"].split()[0]
    [without] = choices(client, bad_words=[word])
    assert f" {word}" not in without["text"] and not without["text"].startswith(word)


def test_best_of_returns_the_most_probable_sequences(client: httpx2.Client) -> None:
    ask = {"temperature": 1.2, "seed": 7, "logprobs": 0}
    every = choices(client, n=5, **ask)
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in choices(client, n=2, best_of=5, **ask)] == [
        each["text"] for each in ranked[:2]
    ]
    streamed = client.post(PATH, json={**STORY, **ask, "n": 2, "best_of": 5, "stream": True})
    assert streamed.status_code == 400 and streamed.json()["error"]["param"] == "best_of"
    assert client.post(PATH, json={**STORY, **ask, "best_of": 1, "stream": True}).status_code == 200


def test_beam_search(client: httpx2.Client) -> None:
    search = {"use_beam_search": True, "beam_width": 4, "n": 3, "length_penalty": 0.5, "early_stopping": "never"}
    found = choices(client, logprobs=0, **search)
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in found]
    assert sums == sorted(sums, reverse=True) and len({choice["text"] for choice in found}) == 3
    [greedy] = choices(client, logprobs=0)
    assert sums[0] >= sum(greedy["logprobs"]["token_logprobs"]) - 1e-4
    texts = [choice["message"]["content"] for choice in choices(client, "/v1/chat/completions", **search)]
    assert len(set(texts)) == 3
    several = client.post(PATH, json={**STORY, **search, "prompt": ["Once", "The cat"], "n": 2}).json()
    assert len(several["choices"]) == 4 and several["usage"]["completion_tokens"] <= 32
    for path, body in ((PATH, STORY), ("/v1/chat/completions", CHAT)):
        refused = client.post(path, json={**body, **search, "stream": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "use_beam_search"
    refused = client.post(PATH, json={**STORY, **search, "top_p": 0.5})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "top_p"


def test_a_disconnect_aborts_a_beam_search(server: ServerProcess, client: httpx2.Client) -> None:
    ask = {**STORY, "use_beam_search": True, "beam_width": 32, "max_tokens": 1000}
    with pytest.raises(httpx2.ReadTimeout):
        client.post(PATH, json=ask, timeout=httpx2.Timeout(30, read=0.05))
    wait_idle(client)


def test_truncate_prompt_tokens(client: httpx2.Client) -> None:
    [short] = choices(client, prompt=[8, 9, 10, 11])
    answer = client.post(
        PATH, json={**STORY, "prompt": [5] * 5000 + [8, 9, 10, 11], "truncate_prompt_tokens": 4}
    ).json()
    assert answer["choices"][0]["text"] == short["text"] and answer["usage"]["prompt_tokens"] == 4
    room = client.get("/v1/models").json()["data"][0]["max_model_len"]
    whole = client.post(PATH, json={**STORY, "prompt": "word " * 5000, "truncate_prompt_tokens": -1}).json()
    assert whole["usage"]["prompt_tokens"] == room - 1
    chat = client.post("/v1/chat/completions", json={**CHAT, "truncate_prompt_tokens": 2}).json()
    assert chat["usage"]["prompt_tokens"] == 2


def test_vllm_xargs_are_accepted_and_have_no_effect_without_a_plugin(client: httpx2.Client) -> None:
    assert choices(client, vllm_xargs={"no_repeat_ngram_size": 2, "more": ["x"]}) == choices(client)


def test_long_lists_for_many_sequences_are_rejected_at_once(server: ServerProcess, client: httpx2.Client) -> None:
    """They would be checked and sent for each sequence, and block other requests for half a minute."""
    words = ["ab cd ef " * 8 + str(i) for i in range(128)]
    many = {"prompt": [[5]] * 2048, "max_tokens": 1}
    long = {"allowed_token_ids": list(range(320)), "stop_token_ids": list(range(320))}
    for ask, name in (
        ({**many, "bad_words": words}, "prompt"),
        ({**many, **long}, "prompt"),
        ({**many, "vllm_xargs": {"a": [1] * 60_000}}, "prompt"),
        ({"n": 128, "temperature": 1, "bad_words": words}, "n"),
    ):
        refused = client.post(PATH, json={**STORY, **ask})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name, refused.text
    assert len(choices(client, prompt=[[5], [6], [7]], bad_words=words, n=1)) == 3


def test_settings_that_allow_no_token_are_a_client_error(client: httpx2.Client) -> None:
    for ask, name in (
        ({"allowed_token_ids": [5], "min_tokens": 3, "stop_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["a"], "structured_outputs": {"choice": ["a"]}}, "bad_words"),
    ):
        refused = client.post(PATH, json={**STORY, **ask})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name, refused.text
