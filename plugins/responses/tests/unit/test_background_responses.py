"""Background responses, resumed streams, conversations and truncation, with OpenAI's SDK and a scripted model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from plugins.responses.tests.builders import server_settings

from mvllm.entrypoints.openai.common.errors import APIError
from mvllm_responses.background import BackgroundResponses
from mvllm_responses.database import EventBatch
from mvllm_responses.settings import ResponsesSettings
from tests.unit.entrypoints.builders import save_model_folder
from tests.unit.entrypoints.live_server import CONVERSATION_TEMPLATE, LiveServer, live_server

ENDED = ("completed", "failed", "cancelled", "incomplete")


def answer(prompt: str) -> str:
    return "word " * 100 if "long" in prompt.split("|")[-2] else "Hello."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = save_model_folder(tmp_path_factory.mktemp("model"), CONVERSATION_TEMPLATE)
    store = str(tmp_path_factory.mktemp("store") / "responses.db")
    stored = ResponsesSettings(responses_store=store, max_stored_bytes=6 << 20)
    settings = server_settings(stored, api_keys=("mine", "another"), max_body_bytes=4 << 20)
    with live_server(folder, answer, settings) as server:
        yield server


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[OpenAI]:
    server.core.pause = 0.0
    with server.sdk("mine") as sdk:
        yield sdk


def wait_ended(sdk: OpenAI, response_id: str) -> Any:
    deadline = time.monotonic() + 120
    while (response := sdk.responses.retrieve(response_id)).status not in ENDED:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return response


def test_a_background_response_is_generated_without_its_client(sdk: OpenAI, server: LiveServer) -> None:
    server.core.pause = 0.005
    first = sdk.responses.create(model="m", input="long", background=True, metadata={"a": "b"})
    assert first.status == "queued" and first.background and first.output == []
    assert sdk.responses.retrieve(first.id).status in ("queued", "in_progress")
    last = wait_ended(sdk, first.id)
    assert last.status == "completed" and last.output_text == answer("user: long|") and last.metadata == {"a": "b"}
    assert last.completed_at is not None and last.usage is not None and last.usage.output_tokens > 100
    on = sdk.responses.create(model="m", input="hi", previous_response_id=first.id)
    assert on.output_text == "Hello."


def test_a_stream_is_resumed_after_any_event_and_its_reader_may_leave(sdk: OpenAI, server: LiveServer) -> None:
    server.core.pause = 0.002
    stream = sdk.responses.create(model="m", input="long", background=True, stream=True)
    seen = [next(iter(stream)) for _ in range(9)]
    stream.close()
    assert [event.sequence_number for event in seen] == list(range(9))
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response_id = seen[0].response.id  # type: ignore[union-attr]
    rest = list(sdk.responses.retrieve(response_id, stream=True, starting_after=8))
    assert [event.sequence_number for event in rest] == list(range(9, 9 + len(rest)))
    assert rest[-1].type == "response.completed"
    deltas = [event.delta for event in [*seen, *rest] if event.type == "response.output_text.delta"]
    assert "".join(deltas) == sdk.responses.retrieve(response_id).output_text == answer("user: long|")
    for after in (-1, 3, len(rest) + 7):  # again, when it has ended
        again = list(sdk.responses.retrieve(response_id, stream=True, starting_after=after))
        assert [event.to_json() for event in again] == [event.to_json() for event in [*seen, *rest][after + 1 :]]
    assert list(sdk.responses.retrieve(response_id, stream=True, starting_after=10**30)) == []
    with pytest.raises(openai.NotFoundError), server.sdk("another") as other:
        other.responses.retrieve(response_id, stream=True)


def test_events_are_stored_after_an_error_of_the_store() -> None:
    stored: list[EventBatch] = []

    class Store:
        fails = True

        async def add_events(self, batches: list[EventBatch]) -> None:
            if self.fails:
                self.fails = False
                raise APIError(503, "the disk is full")
            stored.extend(batches)

    async def test() -> None:
        background = BackgroundResponses(Store(), 1.0)  # type: ignore[arg-type]
        for number in range(2):
            background._add(EventBatch(f"resp_{number}", 0, 0, b"", False))
            async with asyncio.timeout(120):
                while background._flush_task is not None:
                    await asyncio.sleep(0.01)

    asyncio.run(test())
    assert [batch.response_id for batch in stored] == ["resp_1"]


def test_a_response_is_cancelled_once_however_many_ask(sdk: OpenAI, server: LiveServer) -> None:
    server.core.pause = 0.05
    made = sdk.responses.create(model="m", input="long", background=True, stream=True)
    response_id = next(iter(made)).response.id  # type: ignore[union-attr]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: sdk.responses.cancel(response_id).status, range(32)))
    assert set(answers) == {"cancelled"}
    assert wait_ended(sdk, response_id).status == "cancelled" == sdk.responses.cancel(response_id).status
    assert list(made)[-1].type == "response.incomplete"


def test_what_is_wrong_with_a_background_request_is_said_at_once(sdk: OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.responses.create(model="m", input="word " * 400, background=True)
    assert caught.value.param == "input"
    made = sdk.responses.create(model="m", input="hi", background=True)
    wait_ended(sdk, made.id)
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        sdk.responses.retrieve(made.id, stream=True)
    with httpx2.Client(base_url=server.url, headers={"Authorization": "Bearer mine"}) as client:
        assert client.get("/load").json()["server_load"] == 0


def test_a_response_adds_its_input_and_output_to_its_conversation(sdk: OpenAI, server: LiveServer) -> None:
    conversation = sdk.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "hi"}])
    assert conversation.id.startswith("conv_") and conversation.metadata == {"a": "b"}
    made = sdk.responses.create(model="m", input="again", conversation=conversation.id)
    assert made.conversation is not None and made.conversation.id == conversation.id
    assert server.core.prompts[-1].startswith("user: hi|user: again|")
    sdk.responses.create(model="m", input="once more", conversation={"id": conversation.id}, store=False)
    assert server.core.prompts[-1].startswith("user: hi|user: again|assistant: Hello.|user: once more|")
    items = list(sdk.conversations.items.list(conversation.id, order="asc", limit=2))  # in three pages
    assert [item.content[0].text for item in items] == ["hi", "again", "Hello.", "once more", "Hello."]  # type: ignore
    newest = sdk.conversations.items.list(conversation.id, limit=1)
    assert newest.data[0].id == items[-1].id and newest.has_more  # type: ignore[union-attr]
    shown = sdk.conversations.items.retrieve(str(items[1].id), conversation_id=conversation.id)
    assert shown.to_json() == items[1].to_json()
    sdk.conversations.items.delete(str(items[1].id), conversation_id=conversation.id)
    added = sdk.conversations.items.create(conversation.id, items=[{"role": "user", "content": "new"}])
    assert len(added.data) == 1 and len(list(sdk.conversations.items.list(conversation.id))) == 5
    assert sdk.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert sdk.conversations.retrieve(conversation.id).metadata == {"c": "d"}
    with server.sdk("another") as other:
        for use in (other.conversations.retrieve, other.conversations.delete, other.conversations.items.list):
            with pytest.raises(openai.NotFoundError):
                use(conversation.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model="m", input="x", conversation=conversation.id)
    assert sdk.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        sdk.responses.create(model="m", input="x", conversation=conversation.id)


def test_input_items_are_all_items_before_the_output(sdk: OpenAI) -> None:
    first = sdk.responses.create(model="m", input="one")
    second = sdk.responses.create(model="m", input=[{"role": "user", "content": "two"}], previous_response_id=first.id)
    items = list(sdk.responses.input_items.list(second.id, order="asc", limit=2))
    assert [(item.role, item.content[0].text) for item in items] == [  # type: ignore[union-attr, index]
        ("user", "one"),
        ("assistant", "Hello."),
        ("user", "two"),
    ]
    for query in ({"limit": 0}, {"order": "up"}, {"after": "msg_0"}):
        with pytest.raises(openai.BadRequestError):
            sdk.responses.input_items.list(second.id, **query)


def test_truncation_leaves_out_the_oldest_messages_up_to_one_of_the_user(sdk: OpenAI, server: LiveServer) -> None:
    said = [
        {"role": role, "content": f"{role} {number} " + "word " * 20}
        for number in range(6)
        for role in ("user", "assistant")
    ]
    ask: dict[str, Any] = {
        "model": "m",
        "instructions": "Be short.",
        "input": [*said, {"role": "user", "content": "?"}],
    }
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        sdk.responses.create(**ask)
    assert sdk.responses.create(**ask, truncation="auto").output_text == "Hello."
    prompt = server.core.prompts[-1]
    assert prompt.startswith("system: Be short.|user: user ") and prompt.endswith("|user: ?|")
    assert "user 0" not in prompt and "assistant 5" in prompt


def test_many_responses_huge_bodies_and_ids_with_sql(sdk: OpenAI, server: LiveServer) -> None:
    with ThreadPoolExecutor(16) as threads:
        made = list(
            threads.map(lambda i: sdk.responses.create(model="m", input=str(i), background=i % 2 == 0).id, range(200))
        )
        assert len(set(made)) == 200
        assert {wait_ended(sdk, each).status for each in made[::10]} == {"completed"}
    with httpx2.Client(base_url=server.url, headers={"Authorization": "Bearer mine"}) as client:
        for name in ("x'; DROP TABLE objects; --", "resp_0' OR '1'='1", "%00", "%ED%A0%80", "a" * 5000):
            for path in ("/v1/responses/{}", "/v1/conversations/{}/items", "/v1/responses/{}/input_items"):
                assert client.get(path.format(name)).status_code == 404, path
        large: dict[str, Any] = {"items": [{"role": "user", "content": "x" * (3 << 20)}]}
        for _ in range(2):  # the second evicts the first
            assert client.post("/v1/conversations", json=large).status_code == 200
        large["items"] *= 2
        assert client.post("/v1/conversations", json=large).status_code == 413
    assert sdk.responses.create(model="m", input="hi").output_text == "Hello."
