"""What clients read after mistakes in requests: cause and remedy in the words of JSON, with the field in `param`.

The server and its model are those of all files of this folder. A table of mistakes on the command line and in Python
is in `tests/e2e/test_messages.py`.
"""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

CHAT, COMPLETE, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
INVALID_REGEX = "the regular expression cannot be used: unclosed character class, at character 1 of the regex '[a-'."


def part(kind: str, **content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, **content}]}]}


MISTAKES = [
    (CHAT, {"seed": "x"}, "seed must be an integer or null, found a string."),
    (COMPLETE, {"stop": 3}, "stop must be a string, an array or null, found an integer."),
    (CHAT, {"temperature": -1}, "temperature must be a finite number >= 0; got -1.0"),
    (CHAT, {"top_p": 2}, "top_p must be a number > 0 and <= 1; got 2.0"),
    (CHAT, {"n": 0}, "n must be an integer from 1 to 128; got 0"),
    (CHAT, {"top_k": -5}, "top_k must be an integer >= -1 (in 64 bits); got -5"),
    (CHAT, {"max_tokens": 0}, "max_tokens must be at least 1, or 0 in a completion with echo; got 0"),
    (
        COMPLETE,
        {"logprobs": 1000},
        "logprobs must be an integer from 0 to 20, which is the engine's max_logprobs; got 1000",
    ),
    (COMPLETE, {"truncate_prompt_tokens": -5}, "truncate_prompt_tokens must be an integer >= 1, or -1 for as many"),
    (
        COMPLETE,
        {"allowed_token_ids": []},
        "allowed_token_ids must be a list of 1 to 1048576 token ids; got a list of 0",
    ),
    (CHAT, {"thinking_token_budget": -1}, "thinking_token_budget must be an integer >= 0 (in 64 bits); got -1"),
    (COMPLETE, {"early_stopping": "soon"}, "early_stopping must be true, false or 'never'; got 'soon'"),
    (COMPLETE, {"structured_outputs": {"regex": "[a-"}}, f"structured_outputs: {INVALID_REGEX}"),
    (COMPLETE, {"guided_regex": "[a-"}, f"guided_regex: {INVALID_REGEX}"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}},
        "response_format: the JSON schema cannot be used: Invalid type: objekt (at #).",
    ),
    (CHAT, {"messages": []}, "The conversation has no messages; pass at least one."),
    (
        CHAT,
        part("image_url", image_url={"url": "http://127.0.0.1/x.png"}),
        "Message 0 has a part of type 'image_url'; this model accepts only text parts.",
    ),
    (
        CHAT,
        part("input_audio", input_audio={"data": "AA==", "format": "wav"}),
        "Message 0 has a part of type 'input_audio'; this model accepts only text parts.",
    ),
    (
        COMPLETE,
        {"prompt": [5] * 2000},
        "The prompt has 2000 tokens, but prompt and output together may have 1024 (max_model_len), and at least one "
        "token is to be generated. Shorten the prompt.",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": 5}]},
        "The content of message 0 must be a text or a list of text parts; found 5.",
    ),
    (TOKENIZE, {}, "Give either prompt or messages."),
]


@pytest.mark.parametrize(("path", "fields", "says"), MISTAKES, ids=lambda each: str(each)[:40])
def test_a_mistake_in_a_request_is_answered_in_the_words_of_json(
    client: httpx2.Client, path: str, fields: dict[str, Any], says: str
) -> None:
    needed: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
        COMPLETE: {"prompt": "hi"},
        TOKENIZE: {},
    }[path]
    answer = client.post(path, json={"model": "demo", **needed, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith(says), error["message"]
    assert says.endswith(("-5", "many", "of 0")) or error["message"] == says
    assert error["param"] in (*fields, "prompt")


def test_a_body_that_is_no_object_is_named_in_the_words_of_json(client: httpx2.Client) -> None:
    answer = client.post(COMPLETE, json=[])
    assert answer.json()["error"]["message"] == "The body must be an object, found an array."


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "/v1/chat/completion", 404, f"There is no route POST /v1/chat/completion. Did you mean {CHAT}?"),
        ("POST", "/chat/completions", 404, f"There is no route POST /chat/completions. Did you mean {CHAT}?"),
        ("GET", "/nothing", 404, "There is no route GET /nothing."),
        ("GET", COMPLETE, 405, f"GET is no method of {COMPLETE}, which accepts POST."),
    ],
)
def test_a_wrong_path_or_method_is_repeated(
    client: httpx2.Client, method: str, path: str, status: int, says: str
) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, says)
    assert len(client.get("/" + "x" * 5000).json()["error"]["message"]) < 300


def test_a_misspelt_field_is_named_in_a_header(client: httpx2.Client) -> None:
    answer = client.post(COMPLETE, json={"model": "demo", "prompt": "hi", "max_tokens": 1, "topk": 3})
    assert (answer.status_code, answer.headers["x-mvllm-unknown-fields"]) == (200, "topk")
