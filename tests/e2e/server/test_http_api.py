"""HTTP responses, compared exactly where clients depend on the bytes."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import pytest

from mvllm import LLM, SamplingParams
from mvllm.version import __version__
from tests.helpers.server import ServerProcess, as_before, assert_idle, raw_post, wait_idle

STORY = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 6}


def events(answer: httpx2.Response) -> list[Any]:
    """The JSON of each event; checks the framing of events."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, end = answer.text.split("\n\n")
    assert end == "" and parts[-1] == "data: [DONE]"
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def test_a_completion(client: httpx2.Client) -> None:
    answer = client.post("/v1/completions", json=STORY)
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    unset = {"service_tier", "system_fingerprint", "kv_transfer_params"}
    assert set(body) - unset == {"id", "object", "created", "model", "choices", "usage"}
    assert {body[name] for name in unset} == {None}
    assert re.fullmatch("cmpl-[0-9a-f]{32}", body["id"]) and body["object"] == "text_completion"
    assert isinstance(body["created"], int) and body["model"] == "demo"
    [choice] = body["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 8


@pytest.mark.quick
def test_a_streamed_completion(client: httpx2.Client) -> None:
    whole = client.post("/v1/completions", json=STORY).json()
    chunks = events(client.post("/v1/completions", json={**STORY, "stream": True}))
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_at_the_end_and_with_every_chunk(client: httpx2.Client) -> None:
    ask = {**STORY, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post("/v1/completions", json=ask))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    ask["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in (("/v1/completions", ask), ("/v1/chat/completions", {**ask, **CHAT})):
        *chunks, last = events(client.post(path, json=body))
        counted = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
        assert counted == sorted(counted) and counted[-1] == last["usage"]["completion_tokens"] > 0


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_finish_reason(client: httpx2.Client) -> None:
    first, *pieces, last = events(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert all(set(p["choices"][0]["delta"]) == {"content"} and not p["choices"][0]["finish_reason"] for p in pieces)
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "length"
    whole = client.post("/v1/chat/completions", json=CHAT).json()
    assert whole["object"] == "chat.completion" and set(whole["choices"][0]["message"]) >= {"role", "content"}
    assert "".join(p["choices"][0]["delta"]["content"] for p in pieces) == whole["choices"][0]["message"]["content"]


def test_lists_of_prompts_in_every_form(client: httpx2.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": STORY["prompt"]}).json()["tokens"]
    for prompt in (ids, [ids, ids], [STORY["prompt"]] * 2):
        one = client.post("/v1/completions", json=STORY).json()["choices"][0]["text"]
        body = client.post("/v1/completions", json={**STORY, "prompt": prompt}).json()
        assert {choice["text"] for choice in body["choices"]} == {one}
        texts: dict[int, str] = {}
        for chunk in events(client.post("/v1/completions", json={**STORY, "prompt": prompt, "stream": True})):
            for choice in chunk["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == {choice["index"]: choice["text"] for choice in body["choices"]}


def test_log_likelihoods_of_a_prompt_are_those_of_llm(client: httpx2.Client) -> None:
    """As lm_eval requests them: token ids, echo, one more token."""
    prompts = ["The capital of France is Paris", "Once upon a time there was a cat"]
    with LLM("demo", kv_cache_memory_bytes=64 << 20) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        expected = llm.generate(prompts, params, use_tqdm=False)
    ids = [output.prompt_token_ids for output in expected]
    ask = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1}
    choices = client.post("/v1/completions", json=ask).json()["choices"]
    for choice, output, prompt in zip(choices, expected, prompts, strict=True):
        lists = choice["logprobs"]
        assert (
            len({len(lists[name]) for name in lists}) == 1 and len(lists["tokens"]) == len(output.prompt_token_ids) + 1
        )
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        assert output.prompt_logprobs is not None
        for token_id, position, value in zip(
            output.prompt_token_ids[1:], output.prompt_logprobs[1:], lists["token_logprobs"][1:], strict=False
        ):
            assert position is not None and value == pytest.approx(position[token_id].logprob, abs=1e-5)
        assert choice["text"].startswith(prompt)
        for offset, token in list(zip(lists["text_offset"], lists["tokens"], strict=True))[1:]:
            assert choice["text"][offset:].startswith(token)
    [alone] = client.post("/v1/completions", json={**ask, "prompt": ids[0], "max_tokens": 0}).json()["choices"]
    assert alone["text"] == prompts[0]
    assert alone["logprobs"]["token_logprobs"] == choices[0]["logprobs"]["token_logprobs"][:-1]
    streamed = events(client.post("/v1/completions", json={**ask, "prompt": ids[0], "stream": True, "max_tokens": 3}))
    whole = client.post("/v1/completions", json={**ask, "prompt": ids[0], "max_tokens": 3}).json()["choices"][0]
    for name, values in whole["logprobs"].items():
        assert [v for chunk in streamed for v in (chunk["choices"][0]["logprobs"] or {}).get(name, [])] == values


def test_tokens_by_their_ids_and_logprobs_of_the_prompt(client: httpx2.Client) -> None:
    ask = {**STORY, "logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True, "prompt_logprobs": 1}
    [choice] = client.post("/v1/completions", json=ask).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1] * 8
    assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"]) and choice["prompt_logprobs"][0] is None
    chat = client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True, "prompt_logprobs": 0}).json()
    assert len(chat["choices"][0]["token_ids"]) == chat["usage"]["completion_tokens"]
    assert len(chat["prompt_token_ids"]) == len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize("count", [0, 1])
def test_logprobs_of_the_prompt_come_with_the_first_chunk_of_a_stream(client: httpx2.Client, count: int) -> None:
    # Long enough that a slow reader does not get all chunks merged into one.
    ask = {**STORY, "prompt_logprobs": count, "stream": True, "max_tokens": 200, "ignore_eos": True}
    choices = [event["choices"][0] for event in events(client.post("/v1/completions", json=ask))]
    assert len(choices) > 1 and choices[0]["prompt_logprobs"][0] is None
    assert not any("prompt_logprobs" in choice for choice in choices[1:])


def test_defaults_are_the_models_and_limits_the_contexts(client: httpx2.Client) -> None:
    assert client.post("/v1/completions", json={"prompt": "x"}).json()["usage"]["completion_tokens"] <= 16
    forever = {**CHAT, "ignore_eos": True}
    del forever["max_tokens"]
    usage = client.post("/v1/chat/completions", json=forever).json()["usage"]
    assert usage["total_tokens"] == client.get("/v1/models").json()["data"][0]["max_model_len"]
    both = {**CHAT, "max_tokens": 5, "max_completion_tokens": 2, "ignore_eos": True}
    assert client.post("/v1/chat/completions", json=both).json()["usage"]["completion_tokens"] == 2


def test_a_repeated_prompt_is_counted_as_cached(client: httpx2.Client) -> None:
    ask = {"prompt": "A rather long beginning of a story " * 20, "max_tokens": 1, "cache_salt": "of this test"}
    first, second = (client.post("/v1/completions", json=ask).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] > 0
    other = client.post("/v1/completions", json={**ask, "cache_salt": "of another"}).json()["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_null_and_unknown_fields_are_ignored(client: httpx2.Client) -> None:
    nothing = dict.fromkeys(("stop", "n", "seed", "logprobs", "stream", "suffix", "logit_bias", "user", "top_p"))
    plain = client.post("/v1/completions", json=STORY).json()["choices"]
    odd = client.post("/v1/completions", json={**STORY, **nothing, "made_up": {"by": ["somebody"]}})
    assert odd.json()["choices"] == plain


def test_request_ids_are_returned(client: httpx2.Client) -> None:
    assert client.get("/version", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = [client.get("/version", headers=h).headers["x-request-id"] for h in ({}, {"X-Request-Id": "a b\tc"})]
    assert all(re.fullmatch("req-[0-9a-f]{32}", one) for one in made) and made[0] != made[1]


def test_two_requests_with_the_same_id_do_not_mix(server: ServerProcess, client: httpx2.Client) -> None:
    body = json.dumps({**STORY, "stream": True}).encode()
    expected = client.post("/v1/completions", json=STORY).json()["choices"][0]["text"]
    same = {"X-Request-Id": "same", "Content-Type": "application/json"}
    with as_before(server, client):
        with client.stream("POST", "/v1/completions", content=body, headers=same) as one:
            other = client.post("/v1/completions", content=body, headers=same)
            one.read()
    for answer in (one, other):
        assert "".join(chunk["choices"][0]["text"] for chunk in events(answer)) == expected


def test_extra_slashes_are_accepted_and_unknown_paths_are_errors(client: httpx2.Client, server: ServerProcess) -> None:
    for path in ("/v1//models", "//v1/models", "/v1/models/"):
        assert b" 200 OK" in server.exchange(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)):
        answer = client.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_tokenize_and_detokenize(client: httpx2.Client) -> None:
    answer = client.post("/tokenize", json={"prompt": "A fox", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    bare = client.post("/tokenize", json={"prompt": "A fox", "add_special_tokens": False}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": bare}).json() == {"prompt": "A fox"}
    chat = client.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    usage = client.post("/v1/chat/completions", json=CHAT).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [10**6]})):
        assert client.post(path, json=body).status_code == 400


def test_models_version_load_and_health(client: httpx2.Client) -> None:
    assert client.get("/version").json() == {"version": __version__}
    for path in ("/health", "/health/live", "/health/ready", "/ping"):
        assert client.get(path).json() == {"status": "ok"}
        assert client.head(path).status_code == 200
    load = client.get("/load").json()
    assert load["phase"] == "ready" and load["server_load"] == 0
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in page.text and "max_completion_tokens" in page.text
    assert "//" not in re.sub(r"<code>.*?</code>", "", page.text).replace("</", "")  # no resources from other hosts
    document = client.get("/openapi.json").json()
    assert "prompt" in document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "/v1/completions" in document["paths"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            declared = {one["name"] for one in operation.get("parameters", []) if one["in"] == "path"}
            assert declared == set(re.findall(r"{(\w+)}", path)), path


def test_an_idle_server_uses_less_than_one_percent_of_a_cpu(server: ServerProcess, client: httpx2.Client) -> None:
    wait_idle(client)
    assert_idle(server)


def test_the_playground_is_one_file_that_connects_to_this_server_only(client: httpx2.Client) -> None:
    answer = client.get("/", headers={"Accept": "text/html,*/*"})  # as browsers do
    page = answer.text
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == page.count("<script") == policy.count("'sha256-") > 1
    assert "{{" not in page
    assert not re.search(r"(src|href|url)\s*[=(]|https?://|import |innerHTML", page.replace('href="data:,"', ""))


def test_the_playground_uses_routes_fields_and_elements_that_there_are(client: httpx2.Client) -> None:
    page = client.get("/", headers={"Accept": "text/html"}).text
    asked = {f"/{path}" for path in re.findall(r'request\("([^"]+)"', page)}  # relative, for proxies with a prefix
    assert asked == {"/v1/chat/completions", "/load", "/v1/models"}
    assert asked < set(client.get("/openapi.json").json()["paths"])
    assert set(re.findall(r"load\.(\w+)", page)) <= set(client.get("/load").json())
    [card, _] = client.get("/v1/models").json()["data"]
    of_cards = set(re.findall(r"\bcard\(\)\??\.(\w+)", page)) - {"status"}  # which routers add
    assert of_cards == {"capabilities", "input_modalities", "example_messages"} <= set(card)
    ids = re.findall(r' id="([\w-]+)"', page)
    assert len(ids) == len(set(ids))
    [settings] = re.findall(r"const NUMBERS = (\[.*?\]);", page)
    used = set(re.findall(r'\$\("([\w-]+)"\)', page)) | set(json.loads(settings))
    assert used <= set(ids)
    for label in re.findall(r"<(?:button|input|select|textarea)[^>]* id=[^>]*>", page):  # each has a name
        assert re.search(r'aria-label=|hidden>|type="button" class="quiet"|id="(send|close-settings)"', label) or (
            re.search(r"<label[^>]*>[^<]+" + re.escape(label), page)
        ), label


def test_metrics_have_few_label_values(client: httpx2.Client, server: ServerProcess) -> None:
    client.post("/v1/completions", json=STORY)
    for i in range(20):
        client.get(f"/made/up/{i}")
        server.exchange(raw_post(f"/v1/{i}", b"{}"))
    text = client.get("/metrics").text
    for name in ("http_requests_total", "generation_tokens_total", "time_to_first_token_seconds_bucket"):
        assert f"\nmvllm:{name}" in text
    assert 'handler="/v1/completions",method="POST",status="2xx"' in text and "made" not in text
    handlers = set(re.findall(r'http_requests_total\{handler="([^"]*)"', text))
    assert "other" in handlers and len(handlers) < 25


def test_multi_byte_characters_are_not_split_between_chunks(client: httpx2.Client) -> None:
    """Whatever bytes the model generates, chunks are valid text, and add up to the text of the whole answer."""
    ask = {
        "model": "demo",
        "prompt": "Ωδ ü 猫 🦊",
        "temperature": 1.5,
        "seed": 3,
        "max_tokens": 200,
        "ignore_eos": True,
    }
    whole = client.post("/v1/completions", json=ask).json()["choices"][0]["text"]
    chunks = events(client.post("/v1/completions", json={**ask, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
