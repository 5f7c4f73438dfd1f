"""Chat completions with `store: true` are read, changed, listed and deleted, by their key only."""

from __future__ import annotations

from typing import Any

import pytest
from openai import NotFoundError
from plugins.responses.tests.builders import server_settings

from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.messages.requests import FinishReason
from mvllm_responses.settings import ResponsesSettings
from tests.unit.entrypoints.builders import save_model_folder
from tests.unit.entrypoints.live_server import live_server
from tests.unit.entrypoints.scripted_server import TEMPLATE, Server
from tests.unit.entrypoints.test_streamed_chunks import SteppedCore

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Hello."}]
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK: dict[str, Any] = {"messages": MESSAGES, "store": True, "metadata": {"topic": "greeting"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


def test_they_can_be_read_changed_listed_and_deleted(folder: str) -> None:
    server = Server(folder, f"<think>Hm.</think>Well.{CALL}")
    tools = [{"type": "function", "function": FUNCTION}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]
    made, read, messages, changed, listed, deleted, gone, empty = server.exchange(
        ("POST", CHAT, {**ASK, "messages": [*MESSAGES, *parts], "tools": tools}),
        ("GET", f"{CHAT}/{{id}}", None),
        ("GET", f"{CHAT}/{{id}}/messages?limit=1", None),
        ("POST", f"{CHAT}/{{id}}", {"metadata": {"topic": "rain"}}),
        ("GET", f"{CHAT}?metadata[topic]=rain&model=m", None),
        ("DELETE", f"{CHAT}/{{id}}", None),
        ("GET", f"{CHAT}/{{id}}", None),
        ("GET", CHAT, None),
    )
    assert read.json() == {**made.json(), "metadata": {"topic": "greeting"}}
    [message] = messages.json()["data"]
    assert (message["role"], message["content"], message["content_parts"]) == ("user", "Hello.", None)
    assert messages.json()["has_more"] and message["id"] == f"{made.json()['id']}-0"
    assert changed.json()["metadata"] == {"topic": "rain"} and listed.json()["data"] == [changed.json()]
    assert deleted.json() == {"id": made.json()["id"], "object": "chat.completion.deleted", "deleted": True}
    assert gone.status_code == 404 and empty.json()["data"] == []


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": True}, {"stream_options": {"include_usage": True}}])
def test_a_stream_is_stored_as_the_same_completion(folder: str, more: dict[str, Any]) -> None:
    server = Server(folder, f"<think>Hm.</think>Well.{CALL}{CALL}")
    server.core = SteppedCore(server.core.config, server.core.text, FinishReason.STOP)
    body = {**ASK, **more, "tools": [{"type": "function", "function": FUNCTION}]}
    whole = {name: value for name, value in body.items() if name != "stream_options"}
    _, _, listed = server.exchange(
        ("POST", CHAT, whole), ("POST", CHAT, {**body, "stream": True}), ("GET", f"{CHAT}?order=asc", None)
    )
    first, second = listed.json()["data"]
    assert second["usage"] == first["usage"] and len(first["choices"]) == more.get("n", 1)
    for one, other in zip(first["choices"], second["choices"], strict=True):
        calls = [each["message"].pop("tool_calls") for each in (one, other)]
        functions = [[call["function"] for call in each] for each in calls]
        assert functions[0] == functions[1]
        assert {name: value for name, value in one["message"].items() if value is not None} == {
            name: value for name, value in other["message"].items() if value is not None
        }
        assert (one["finish_reason"], one["logprobs"]) == (other["finish_reason"], other["logprobs"])


def test_only_those_that_ask_for_it_are_stored(folder: str) -> None:
    server = Server(folder, "Hello you.")
    *_, listed = server.exchange(
        ("POST", CHAT, {"messages": MESSAGES}),
        ("POST", CHAT, {"messages": MESSAGES, "store": False}),
        ("GET", CHAT, None),
    )
    assert listed.json()["data"] == []
    server.settings = server_settings(ResponsesSettings(max_stored_responses=0))
    made, listed = server.exchange(("POST", CHAT, ASK), ("GET", CHAT, None))
    assert made.status_code == 200 and listed.json()["data"] == []
    [bad] = server.exchange(("POST", CHAT, {**ASK, "metadata": {"a": 1}}))
    assert bad.status_code == 200  # it is stored nowhere


def test_they_belong_to_their_key_and_are_no_conversations(folder: str) -> None:
    server = Server(folder, "Hello you.")
    server.settings = ServerSettings(api_keys=("mine", "other"), admin_api_keys=("boss",))
    paths = [f"{CHAT}/{{id}}", f"{CHAT}/{{id}}/messages", "/v1/conversations/{id}", "/v1/conversations/{id}/items"]
    made, *foreign, listed, own, as_conversation, boss = server.exchange(
        ("POST", CHAT, ASK),
        *(("GET", path, None) for path in paths),
        ("GET", CHAT, None),
        ("GET", CHAT, None),
        ("POST", RESPONSES, {"input": "x", "conversation": "{id}"}),
        ("GET", CHAT, None),
        keys=["mine", *["other"] * 5, "mine", "mine", "boss"],
    )
    assert made.status_code == 200 and [answer.status_code for answer in foreign] == [404] * 4
    assert listed.json()["data"] == [] and as_conversation.status_code == 404
    assert [each["id"] for each in own.json()["data"]] == [made.json()["id"]]
    assert boss.json()["data"] == own.json()["data"]


def test_pages_and_the_sdk(folder: str) -> None:
    with live_server(folder, lambda prompt: "Hello you.", ServerSettings()) as live, live.sdk() as sdk:
        chats = sdk.chat.completions
        ids = [
            chats.create(model="m", messages=MESSAGES, store=True, metadata={"number": str(i)}).id  # type: ignore[call-overload]
            for i in range(5)
        ]
        assert [each.id for each in chats.list(limit=2)] == ids  # reads all pages
        assert [each.id for each in chats.list(limit=2, order="desc")] == ids[::-1]
        assert [each.id for each in chats.list(metadata={"number": "3"})] == [ids[3]]
        assert [each.content for each in chats.messages.list(ids[0])] == ["Hello."]
        assert chats.update(ids[0], metadata={"a": "b"}).metadata == {"a": "b"}  # type: ignore[attr-defined]
        assert chats.delete(ids[1]).deleted and len(list(chats.list())) == 4
        with pytest.raises(NotFoundError):
            chats.retrieve(ids[1])
        counted = sdk.responses.input_tokens.count(model="m", input="Hello.", instructions="Be short.")
        made = sdk.responses.create(model="m", input="Hello.", instructions="Be short.")
        assert counted.input_tokens == made.usage.input_tokens  # type: ignore[union-attr]
