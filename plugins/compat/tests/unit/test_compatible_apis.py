"""What both APIs share with core's: limits, media types, numbers, thoughts, tools, and the first word of a text."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mvllm.entrypoints.openai.common.chat_template_renderer import ChatTemplateRenderer
from mvllm.entrypoints.openai.common.request_body import BodyDecoder
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.messages.requests import FinishReason
from mvllm_compat.anthropic.protocol import MessagesRequest
from mvllm_compat.ollama.embeddings import OllamaEmbedHandler, ollama_embeddings_handler
from mvllm_compat.ollama.input_messages import chat_messages
from mvllm_compat.ollama.protocol import (
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaOptions,
)
from tests.unit.engine.tokenizers import make_tokenizer
from tests.unit.entrypoints.builders import save_model_folder
from tests.unit.entrypoints.scripted_server import TEMPLATE, Server

MESSAGES = [{"role": "user", "content": "Hello."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "Hello.", "stream": False},
}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LONG = "many words " * 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        ),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
        ("/api/chat", {"messages": [*MESSAGES, {"role": "user", "content": LONG}], "truncate": False}),
    ],
)
def test_a_text_that_cannot_fit_is_not_rendered(
    folder: str, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def render(*unused: object) -> str:
        raise AssertionError("it was rendered")

    monkeypatch.setattr(TokenizerPool, "render", render)
    answer = Server(folder, "x").post(body, path)
    assert answer.status_code == 400 and "1100" in answer.text and "max_model_len" in answer.text


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_conversation_far_over_the_context_loses_its_oldest_messages(folder: str, role: str) -> None:
    messages = [*MESSAGES, {"role": role, "content": LONG * 5}, {"role": "user", "content": "the last"}]
    server = Server(folder, "x")
    with contextlib.closing(ChatTemplateRenderer()) as server.templates:
        answer = server.post({"messages": messages, "stream": False}, "/api/chat")
    assert answer.status_code == 200, answer.text
    [prompt] = server.core.prompts
    assert "the last" in prompt and "many" not in prompt


def test_programs_may_send_json_without_its_header(folder: str) -> None:
    requests = [
        {"url": path, "content": json.dumps(body), "headers": headers}
        for path, body in BODIES.items()
        for headers in ({"Content-Type": "application/x-www-form-urlencoded"}, {})
    ]
    answers = Server(folder, "Hello you.").send(*requests)
    assert [answer.status_code for answer in answers] == [200] * len(requests), answers[0].text


@pytest.mark.parametrize("kind", [MessagesRequest, OllamaEmbedRequest, OllamaOptions])
def test_integral_floats_are_integers(kind: type[msgspec.Struct]) -> None:
    """Clients in languages without integers send 4.0."""
    names = {"max_tokens", "top_k", "seed", "priority", "min_tokens", "dimensions", "num_predict"}
    found = names & set(kind.__struct_fields__)
    assert found
    for name in found:
        value = getattr(BodyDecoder(kind).decode(b'{"%s": 4.0}' % name.encode()), name)
        assert value == 4 and type(value) is int, name


def test_integral_floats_in_requests_of_both_apis(folder: str) -> None:
    server = Server(folder, "Hello you.")
    thinking = {"type": "enabled", "budget_tokens": 2.0}
    answers = server.exchange(
        ("POST", "/v1/messages", {**BODIES["/v1/messages"], "max_tokens": 4.0, "thinking": thinking}),
        ("POST", "/api/chat", {**BODIES["/api/chat"], "options": {"num_predict": 4.0, "temperature": 1}}),
        ("POST", "/api/chat", {**BODIES["/api/chat"], "options": {"num_predict": 4.5}}),
    )
    assert [answer.status_code for answer in answers] == [200, 200, 400], [answer.text for answer in answers]
    assert [request.sampling_params.max_tokens for request in server.core.requests] == [4, 4]
    assert "options.num_predict" in answers[2].json()["error"]


def test_head_is_get_without_its_body(folder: str) -> None:
    for url in ("/api/tags", "/api/ps", "/api/version"):
        get, head = Server(folder, "x").send({"method": "GET", "url": url}, {"method": "HEAD", "url": url})
        assert (get.status_code, head.status_code, head.content) == (200, 200, b"")


def test_an_empty_list_of_inputs_has_an_empty_list_of_vectors(folder: str) -> None:
    new, old = Server(folder, "x").exchange(
        ("POST", "/api/embed", {"input": []}), ("POST", "/api/embeddings", {"prompt": ""})
    )
    assert new.json()["embeddings"] == [] and old.json() == {"embedding": []}


def test_parts_may_be_texts_and_tools_need_no_type(folder: str) -> None:
    server = Server(folder, CALL)
    parts, tool = [{"role": "user", "content": ["text", "plain"]}], {"function": FUNCTION}
    messages, chat = server.exchange(
        ("POST", "/v1/messages", {"messages": parts, "max_tokens": 4}),
        ("POST", "/api/chat", {**BODIES["/api/chat"], "tools": [tool]}),
    )
    assert messages.status_code == 200 and "text\nplain" in server.core.prompts[0]
    assert chat.json()["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(("begun", "is_thought"), [("<think>I add", True), ("<think>I add.</think>Four", False)])
def test_a_prefilled_message_has_a_budget_if_it_ends_within_thoughts(folder: str, begun: str, is_thought: bool) -> None:
    server = Server(folder, " and two.</think>It is four." if is_thought else " is the sum.")
    body = {"max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer = server.post({**body, "messages": [*MESSAGES, {"role": "assistant", "content": begun}]}, "/v1/messages")
    params = server.core.requests[0].sampling_params
    assert params.thinking_token_budget == (1024 if is_thought else None)
    texts = {block["type"]: block.get("thinking") or block.get("text") for block in answer.json()["content"]}
    expected = ("and two.", "It is four.") if is_thought else (None, " is the sum.")
    assert (texts.get("thinking"), texts["text"]) == expected


def arguments_of_both_apis(server: Server) -> list[Any]:
    """The arguments of the one call: of messages whole, and as the text of a stream, and of chats likewise."""
    anthropic = {"tools": [{"name": "weather", "input_schema": {"type": "object"}}], "max_tokens": 99}
    ollama = {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]}

    def events(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        text = server.post({**body, "stream": True}, path).text
        lines = [line.removeprefix("data: ") for line in text.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]

    anthropic["messages"] = MESSAGES
    content = server.post(anthropic, "/v1/messages").json()["content"]
    [block] = [one for one in content if one["type"] == "tool_use"]
    pieces = [one["delta"] for one in events("/v1/messages", anthropic) if one["type"] == "content_block_delta"]
    [call] = server.post({**ollama, "stream": False}, "/api/chat").json()["message"]["tool_calls"]
    [streamed] = [call for one in events("/api/chat", ollama) for call in one["message"].get("tool_calls", ())]
    text = "".join(one.get("partial_json", "") for one in pieces)
    return [block["input"], text, call["function"]["arguments"], streamed["function"]["arguments"]]


def test_the_arguments_of_a_call_without_an_end_are_json_unless_it_was_cut_off(folder: str) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "re": "\\d", '
    expected = {"city": "Paris", "re": "\\d"}
    whole, streamed, chat, chat_streamed = arguments_of_both_apis(Server(folder, text))
    assert whole == json.loads(streamed) == chat == chat_streamed == expected
    whole, streamed, chat, chat_streamed = arguments_of_both_apis(Server(folder, text, FinishReason.LENGTH))
    with pytest.raises(json.JSONDecodeError):
        json.loads(streamed)
    assert whole == chat == chat_streamed == {"INVALID_JSON": streamed}


USER, BEGUN = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is"}
SPACED_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_first_word_keeps_its_space(tmp_path_factory: pytest.TempPathFactory, stream: bool) -> None:
    """With tokenizers whose decoder drops the space of the first word."""
    kind = "marks_first"
    server = Server(save_model_folder(tmp_path_factory.mktemp("spaced"), SPACED_TEMPLATE, kind), "a small text")
    server.core.tokenizer, server.core.reason = make_tokenizer(kind), FinishReason.LENGTH
    server.parsers["reasoning_parser"] = None
    for path, body in (
        ("/v1/messages", {"max_tokens": 20, "messages": [USER]}),
        ("/v1/messages", {"max_tokens": 20, "messages": [USER, BEGUN]}),
        ("/api/chat", {"messages": [USER]}),
        ("/api/chat", {"messages": [USER, BEGUN]}),
        ("/api/generate", {"prompt": "It is", "raw": True}),
    ):
        text = server.post({**body, "stream": stream}, path).text
        lines = [line.removeprefix("data: ") for line in text.splitlines()]
        found = ""
        for each in [json.loads(line) for line in lines if line.startswith("{")]:
            content = [*each.get("content", ()), each.get("delta") or {}]
            found += "".join(one.get("text", "") for one in content)
            found += each.get("response") or (each["message"].get("content", "") if path == "/api/chat" else "")
        assert found == " a small text", path


class TestOllama:
    """Long conversations, images, and durations."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_chat_that_is_too_long_loses_its_oldest_messages(self, folder: str, stream: bool) -> None:
        server = Server(folder, "Hello you.")
        turns = [
            {"role": role, "content": f"{role} {i} word word word"} for i in range(40) for role in ("user", "assistant")
        ]
        messages = [{"role": "system", "content": "Be short."}, *turns, {"role": "user", "content": "The last one."}]
        for body in ({"messages": messages}, {"messages": messages, "truncate": True}):
            answer = server.post({**body, "stream": stream}, "/api/chat")
            assert answer.status_code == 200, answer.text
            prompt = server.core.prompts[-1]
            assert prompt.startswith("system: Be short.user: user ") and prompt.rstrip().endswith("The last one.")
            assert "user 0 " not in prompt and "user 39 " in prompt
            num_tokens = json.loads(answer.text.splitlines()[-1])["prompt_eval_count"]
            assert 256 * 3 // 4 < num_tokens <= 256 - 256 // 8
        refused = server.post({"messages": messages, "truncate": False}, "/api/chat")
        assert refused.status_code == 400 and "max_model_len" in refused.json()["error"]

    def test_a_message_that_is_too_long_keeps_its_end(self, folder: str) -> None:
        server = Server(folder, "Hello you.")
        text = "word " * 300 + "The end."
        for path, body in (
            ("/api/chat", {"messages": [{"role": "user", "content": text}]}),
            ("/api/generate", {"prompt": text, "system": "Be short."}),
            ("/api/generate", {"prompt": text, "raw": True}),
        ):
            for options in ({}, {"num_predict": 4}):
                answer = server.post({**body, "stream": False, "options": options}, path)
                assert answer.status_code == 200, answer.text
                left = options.get("num_predict", 256 // 8)
                assert answer.json()["prompt_eval_count"] == 256 - left
                assert server.core.prompts[-1].rstrip().endswith("The end.")
            assert server.post({**body, "truncate": False}, path).status_code == 400

    def test_images_are_base64_or_data_urls(self) -> None:
        images = ["AA\nBB", "data:image/jpeg;base64,AABB"]
        [message] = chat_messages([{"role": "user", "content": "x", "images": images}])
        urls = [part["image_url"]["url"] for part in message["content"][:2]]
        assert urls == ["data:image/png;base64,AA\nBB", images[1]]

    def test_the_time_for_which_a_request_has_waited_for_its_model_is_its_load_duration(self, folder: str) -> None:
        body, embed = BODIES["/api/chat"], {"input": []}
        waited = {"x-mvllm-load-nanoseconds": "5000000000"}
        server = Server(folder, "Hello you.")
        for path, each in (("/api/chat", body), ("/api/embed", embed)):
            plain, late, odd = server.send(
                {"url": path, "json": each},
                {"url": path, "json": each, "headers": waited},
                {"url": path, "json": each, "headers": {"x-mvllm-load-nanoseconds": "-1"}},
            )
            for answer in (plain, odd):
                assert 0 < answer.json()["load_duration"] < answer.json()["total_duration"] < 5e9
            assert 5e9 < late.json()["load_duration"] < late.json()["total_duration"]

    def test_the_older_route_for_embeddings_does_not_scale_them(self) -> None:
        context: Any = SimpleNamespace(engine=None)
        older = ollama_embeddings_handler(context, "m", OllamaEmbeddingsRequest(prompt="x"))
        newer = OllamaEmbedHandler(context, "m", OllamaEmbedRequest(input="x"))
        assert (older._inputs.params.normalize, newer._inputs.params.normalize) == (False, True)
