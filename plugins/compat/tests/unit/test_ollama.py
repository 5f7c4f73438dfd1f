"""The Ollama API: options become sampling parameters, deltas become lines of JSON, errors have their format."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mvllm.config.model_kind import ModelKind
from mvllm.config.multimodal import MultiModalConfig, MultiModalModel
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.messages.requests import FinishReason
from mvllm_compat.ollama.embeddings import OllamaEmbedHandler
from mvllm_compat.ollama.input_messages import chat_messages, chat_request, generate_request
from mvllm_compat.ollama.models import capabilities
from mvllm_compat.ollama.protocol import OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest
from tests.unit.entrypoints.builders import TOKENIZER, save_model_folder
from tests.unit.entrypoints.scripted_server import TEMPLATE, Server

CHAT, GENERATE = "/api/chat", "/api/generate"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
THOUGHT = "<think>It may rain.</think>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK: dict[str, Any] = {
    "model": "m:latest",
    "messages": [{"role": "user", "content": "What is the weather?"}],
    "tools": [TOOL],
}
DEEP = json.loads("[" * 300 + "]" * 300)
DONE_FIELDS = {
    *("model", "created_at", "message", "done", "done_reason", "total_duration", "load_duration"),
    *("prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_an_answer_has_thinking_content_and_complete_calls(folder: str) -> None:
    server = Server(folder, f"{THOUGHT}Let me see.{CALL}{CALL}")
    answer = server.post({**ASK, "stream": False}, CHAT).json()
    assert set(answer) == DONE_FIELDS
    message = answer["message"]
    assert (message["role"], message["content"], message["thinking"]) == ("assistant", "Let me see.", "It may rain.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"index": i, "name": "weather", "arguments": {"city": "Paris"}} for i in range(2)
    ]
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("m:latest", True, "stop")
    num_prompt = len(TOKENIZER.encode(server.core.prompts[0], add_special_tokens=False))
    assert answer["prompt_eval_count"] == num_prompt and answer["eval_count"] > 10
    assert answer["total_duration"] >= answer["eval_duration"] > 0 and answer["prompt_eval_duration"] > 0


def test_a_stream_has_the_same_answer_in_lines_and_is_the_default(folder: str) -> None:
    server = Server(folder, f"{THOUGHT}Let me see.{CALL}{CALL}")
    whole = server.post({**ASK, "stream": False}, CHAT).json()
    streamed = server.post(ASK, CHAT)
    assert streamed.headers["content-type"] == "application/x-ndjson"
    *parts, last = lines(streamed.text)
    assert set(last) == DONE_FIELDS and last["message"] == {"role": "assistant", "content": ""}
    assert {part["done"] for part in parts} == {False} and last["done"] is True and len(parts) > 4
    for name in ("content", "thinking"):
        assert "".join(part["message"].get(name, "") for part in parts) == whole["message"][name]
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    expected = [call["function"] for call in whole["message"]["tool_calls"]]
    assert [call["function"] for call in calls] == expected
    assert last["eval_count"] == whole["eval_count"]


def test_generate_renders_the_template_unless_the_prompt_is_raw(folder: str) -> None:
    server = Server(folder, f"{THOUGHT}Yes.")
    plain, raw, streamed = server.exchange(
        ("POST", GENERATE, {"model": "m", "prompt": "Is it?", "system": "Be short.", "stream": False}),
        ("POST", GENERATE, {"prompt": "Is it?", "raw": True, "stream": False}),
        ("POST", GENERATE, {"prompt": "Is it?", "options": {"num_predict": -1}}),
    )
    assert (plain.json()["response"], plain.json()["thinking"]) == ("Yes.", "It may rain.")
    assert raw.json()["response"] == f"{THOUGHT}Yes." and "thinking" not in raw.json()
    assert server.core.prompts[0] == "system: Be short.user: Is it?" and server.core.prompts[1].endswith("Is it?")
    assert "user" not in server.core.prompts[1]
    parts = lines(streamed.text)
    assert "".join(part["response"] for part in parts) == "Yes." and parts[-1]["done_reason"] == "stop"


def test_a_model_without_a_template_continues_the_prompt(tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = save_model_folder(tmp_path_factory.mktemp("plain"), None)
    server = Server(plain, "time.", tool_parser=None, reasoning_parser=None)
    answer, refused = server.exchange(
        ("POST", GENERATE, {"prompt": "Once upon a", "stream": False}),
        ("POST", CHAT, {"messages": ASK["messages"]}),
    )
    assert answer.json()["response"] == "time." and server.core.prompts[0].endswith("Once upon a")
    assert refused.status_code == 400 and "chat template" in refused.json()["error"]


def test_a_cut_answer_says_so(folder: str) -> None:
    answer = Server(folder, "Hello.", FinishReason.LENGTH).post({**ASK, "stream": False}, CHAT).json()
    assert answer["done_reason"] == "length"


def test_options_become_sampling_parameters() -> None:
    options = {
        "temperature": 0.5,
        "num_predict": 7,
        "repeat_penalty": 1.5,
        "stop": "x",
        "num_ctx": 1024,
        "x" * 99: DEEP,
    }
    found = chat_request(OllamaChatRequest(messages=[], options=options, think="max", format="json"))
    assert (found.temperature, found.max_tokens, found.repetition_penalty, found.stop) == (0.5, 7, 1.5, "x")
    assert found.reasoning_effort == "high" and found.chat_template_kwargs["enable_thinking"] is True
    assert found.response_format == {"type": "json_object"} and found.stream is True
    quiet = generate_request(OllamaGenerateRequest(prompt="a", think=False, format={"type": "object"}, stream=False))
    assert quiet.include_reasoning is False and quiet.chat_template_kwargs["enable_thinking"] is False
    assert quiet.response_format["json_schema"]["schema"] == {"type": "object"} and quiet.stream is False
    assert chat_request(OllamaChatRequest(messages=[], options={"num_predict": -1})).max_tokens is None


def test_results_of_tools_belong_to_the_calls_before_them() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    results = [{"role": "tool", "content": str(i), "tool_name": name} for i, name in enumerate(("b", "a", "a"))]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
        *results,
        {"role": "assistant", "tool_calls": [{"id": "mine", "function": {"name": "c", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4", "tool_name": "d"},
    ]
    user, turn, *answers = chat_messages(messages)
    ids = [call["id"] for call in turn["tool_calls"]]
    assert turn["reasoning"] == "hm" and len(set(ids)) == 3 and user == messages[0]
    found = [(answer.get("tool_call_id"), answer.get("name")) for answer in answers if answer["role"] == "tool"]
    assert found == [(ids[1], "b"), (ids[0], "a"), (ids[2], "a"), ("mine", "c"), (None, "d")]
    by_id = [{"role": "tool", "content": "x", "tool_call_id": "mine"}, {"role": "tool", "content": "y"}]
    *_, first, second = chat_messages([messages[5], *by_id])
    assert first["tool_call_id"] == "mine" and "tool_call_id" not in second


def test_a_request_without_a_prompt_loads_the_model_which_is_loaded(folder: str) -> None:
    server = Server(folder, "Hello.")
    chat, generate = server.exchange(
        ("POST", CHAT, {"model": "m", "messages": [], "keep_alive": "5m"}), ("POST", GENERATE, {"model": "m"})
    )
    assert chat.json()["done_reason"] == generate.json()["done_reason"] == "load"
    assert generate.json()["response"] == chat.json()["message"]["content"] == "" and server.core.prompts == []


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": 5}, "messages must be an array"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": DEEP}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]}, "only text"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [5]}]}, "tool_calls[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 300, "truncate": False}, "max_model_len"),
    (GENERATE, {"prompt": "word " * 300, "truncate": False}, "max_model_len"),
    (CHAT, {"options": {"temperature": "hot"}}, "options.temperature must be a number"),
    (CHAT, {"options": {"temperature": -1}}, "temperature"),
    (CHAT, {"options": {"seed": 2**70}}, "seed"),
    (CHAT, {"options": 5}, "options must be an object"),
    (CHAT, {"format": "yaml", "tools": None}, "format must be"),
    (CHAT, {"format": {"type": "object"}}, "format and tools"),
    (CHAT, {"think": "a lot"}, "think must be"),
    (CHAT, {"logprobs": True}, "logprobs is not supported"),
    (CHAT, {"tools": [{"type": "x"}]}, "tools[0]"),
    (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "template is not supported"),
    (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix is not supported"),
    (GENERATE, {"prompt": "x", "context": [1]}, "context is not supported"),
    (GENERATE, {"prompt": "x", "images": ["AA=="]}, "only text"),
    (GENERATE, {"prompt": "x", "system": "y", "raw": True}, "raw"),
    ("/api/embed", {"input": 5}, "input must be a string"),
    ("/api/embed", {}, "input is missing"),
    ("/api/show", {"model": "nobody"}, "`nobody` does not exist"),
    (CHAT, {"model": "m:other"}, "`m:other` does not exist"),
]


def test_errors_are_texts_with_the_right_status(folder: str) -> None:
    requests = [("POST", path, {**(ASK if path == CHAT else {}), **more}) for path, more, _ in REFUSED]
    answers = Server(folder, "Hello.").exchange(*requests)
    for answer, (path, more, message) in zip(answers, REFUSED, strict=True):
        assert answer.status_code == (404 if "exist" in message else 400), (path, more, answer.text)
        assert set(answer.json()) == {"error"} and message in answer.json()["error"], (path, more, answer.text)


def test_an_error_in_a_stream_is_a_line(folder: str) -> None:
    *_, last = lines(Server(folder, "Hello.", FinishReason.ERROR).post(ASK, CHAT).text)
    assert set(last) == {"error"}


def test_the_model_is_listed_with_its_details(folder: str) -> None:
    tags, running, shown, by_name, version, missing = Server(folder, "Hello.").exchange(
        ("GET", "/api/tags", None),
        ("GET", "/api/ps", None),
        ("POST", "/api/show", {"model": "m:latest"}),
        ("POST", "/api/show", {"name": "m"}),
        ("GET", "/api/version", None),
        ("POST", "/api/pull", {"model": "x"}),
    )
    [entry], [loaded] = tags.json()["models"], running.json()["models"]
    assert entry["name"] == entry["model"] == loaded["name"] == "m:latest" and len(entry["digest"]) == 64
    assert entry["details"]["family"] == "llama" and entry["details"]["quantization_level"] == "F32"
    assert loaded["context_length"] == 256 and "size_vram" in loaded and "expires_at" in loaded
    found = shown.json()
    assert found == by_name.json() and found["template"] == TEMPLATE
    assert found["capabilities"] == ["completion", "tools", "thinking"]
    assert found["model_info"]["general.architecture"] == "llama" and found["model_info"]["llama.context_length"] == 256
    assert version.json()["version"].count(".") == 2
    assert missing.status_code == 404 and isinstance(missing.json()["error"], str)


@pytest.mark.parametrize(
    ("settings", "sees"), [({}, True), ({"refusal": "no"}, False), ({"limit_per_prompt": {"image": 0}}, False)]
)
def test_a_model_that_takes_images_has_vision(settings: dict[str, Any], sees: bool) -> None:
    kind = SimpleNamespace(generates=True)
    takes = MultiModalModel(placeholders={"image": 7})
    config = SimpleNamespace(
        model=SimpleNamespace(multimodal=takes, kind=kind), multimodal=MultiModalConfig(**settings)
    )
    engine = SimpleNamespace(config=config, model_config=config.model)
    renderer = SimpleNamespace(tool_parser=None, reasoning_parser=None)
    context = ServingContext(cast(Any, engine), cast(Any, None), cast(Any, renderer))
    assert capabilities(context) == ["completion", *(["vision"] if sees else [])]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(ModelKind(generates=False), ["embedding"]), (ModelKind(generates=False, num_labels=2), [])],
    ids=["embeddings", "classes"],
)
def test_a_model_for_embeddings_says_so(kind: ModelKind, expected: list[str]) -> None:
    engine = SimpleNamespace(model_config=SimpleNamespace(kind=kind))
    assert capabilities(ServingContext(cast(Any, engine), cast(Any, None), cast(Any, None))) == expected


def test_the_vectors_of_a_request_do_not_wait_for_garbage_collection() -> None:
    context = cast(ServingContext, SimpleNamespace(engine=None))
    gc.disable()
    try:
        handler = weakref.ref(OllamaEmbedHandler(context, "m", OllamaEmbedRequest(input="x")))
        assert handler() is None
    finally:
        gc.enable()


def test_the_root_says_what_clients_look_for_and_shows_browsers_the_page(folder: str) -> None:
    server = Server(folder, "Hello.")
    for headers in ({}, {"Accept": "application/json"}):
        get, head = server.exchange(("GET", "/", None), ("HEAD", "/", None), headers=headers)
        first, second = get.text.splitlines()
        assert first == "Ollama is running" and second.startswith("mvllm is running.") and "/docs" in second
        assert get.status_code == head.status_code == 200 and head.content == b""
    [page] = server.exchange(("GET", "/", None), headers={"Accept": "text/html,*/*"})
    assert page.text.startswith("<!doctype html>") or page.text.startswith("<!DOCTYPE html>")
    server.settings = replace(server.settings, docs=False)
    [plain] = server.exchange(("GET", "/", None), headers={"Accept": "text/html"})
    assert plain.text == "Ollama is running\nmvllm is running.\n"
