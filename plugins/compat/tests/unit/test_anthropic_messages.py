"""The Anthropic Messages API: blocks become messages, deltas become blocks and events, errors have their format."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from mvllm.errors import RequestError
from mvllm.messages.requests import FinishReason
from mvllm_compat.anthropic import messages as messages_api
from mvllm_compat.anthropic.input_messages import MAX_BLOCKS, chat_messages, to_chat_request
from mvllm_compat.anthropic.protocol import MessagesRequest
from mvllm_compat.tool_arguments import arguments_object
from tests.unit.entrypoints.builders import TOKENIZER, save_model_folder
from tests.unit.entrypoints.scripted_server import TEMPLATE, Server

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "x"}}
THOUGHT = "<think>It may rain.</think>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK: dict[str, Any] = {
    "model": "m",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "What is the weather?"}],
    "tools": [TOOL],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream; checks that each has the type of its first line."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_thinking_text_and_a_call_are_three_blocks(folder: str) -> None:
    server = Server(folder, f"{THOUGHT}Let me see.{CALL}")
    answer = server.post(ASK, PATH).json()
    thought, text, call = answer["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "It may rain.") and thought["signature"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Paris"})
    assert call["id"].startswith("toolu_") and answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "m")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    prompt = server.core.prompts[0]
    assert prompt == "user: What is the weather?weather "
    assert answer["usage"]["input_tokens"] == len(TOKENIZER.encode(prompt, add_special_tokens=False))
    assert answer["usage"]["output_tokens"] > 10 and answer["usage"]["cache_read_input_tokens"] == 0


def test_a_stream_has_the_events_of_the_same_message_in_the_order_of_the_api(folder: str) -> None:
    server = Server(folder, f"{THOUGHT}Let me see.{CALL}{CALL}")
    whole, streamed = (server.post({**ASK, "stream": stream}, PATH) for stream in (False, True))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    found = events(streamed.text)
    kinds = [event["type"] for event in found if event["type"] != "content_block_delta"]
    assert kinds == [
        *("message_start", "ping"),
        *["content_block_start", "content_block_stop"] * 4,
        *("message_delta", "message_stop"),
    ]
    final, start = whole.json(), found[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == final["usage"]["input_tokens"]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"] == final["usage"]
    for index, block in enumerate(final["content"]):
        mine = [event for event in found if event.get("index") == index]
        assert mine[0]["content_block"]["type"] == block["type"]
        deltas = [event["delta"] for event in mine[1:-1]]
        if block["type"] == "tool_use":
            assert json.loads("".join(delta["partial_json"] for delta in deltas)) == block["input"]
            assert {delta["type"] for delta in deltas} == {"input_json_delta"} and len(deltas) > 1
        elif block["type"] == "thinking":
            assert deltas.pop() == {"type": "signature_delta", "signature": block["signature"]}
            assert "".join(delta["thinking"] for delta in deltas) == block["thinking"]
        else:
            assert "".join(delta["text"] for delta in deltas) == block["text"]


def test_a_thinking_budget_is_that_of_the_usual_tags_where_the_server_cannot_tell_thoughts(folder: str) -> None:
    server = Server(folder, "It rains.", reasoning_parser=None)
    assert server.post(ASK, PATH).json()["content"] == [{"type": "text", "text": "It rains."}]
    params = server.core.requests[-1].sampling_params
    assert params.thinking_token_budget == 1024
    assert params.thinking_tokens.starts == [TOKENIZER.encode("<think>", add_special_tokens=False)]


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_thinking_that_was_not_asked_for_is_left_out(folder: str, thinking: dict[str, Any] | None) -> None:
    server = Server(folder, f"{THOUGHT}Yes.")
    whole, streamed = (server.post({**ASK, "thinking": thinking, "stream": stream}, PATH) for stream in (False, True))
    assert whole.json()["content"] == [{"type": "text", "text": "Yes."}]
    deltas = [event["delta"] for event in events(streamed.text) if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["text"] for delta in deltas) == "Yes."


def test_each_end_of_a_message_has_its_stop_reason(folder: str) -> None:
    ask = {**ASK, "thinking": None}

    def stop(server: Server, **more: Any) -> tuple[str, str | None]:
        whole, streamed = (server.post({**ask, **more, "stream": stream}, PATH) for stream in (False, True))
        answer = whole.json()
        delta = events(streamed.text)[-2]["delta"]
        assert delta == {name: answer[name] for name in ("stop_reason", "stop_sequence")}
        return answer["stop_reason"], answer["stop_sequence"]

    assert stop(Server(folder, "Hello there.")) == ("end_turn", None)
    assert stop(Server(folder, "Hello there."), stop_sequences=["x", "there"]) == ("stop_sequence", "there")
    assert stop(Server(folder, CALL)) == ("tool_use", None)
    num_tokens = len(TOKENIZER.encode("Hello there.", add_special_tokens=False))
    cut = Server(folder, "Hello there.", FinishReason.LENGTH)
    assert stop(cut, max_tokens=num_tokens) == ("max_tokens", None)
    assert stop(cut, max_tokens=100_000) == ("model_context_window_exceeded", None)


@pytest.mark.parametrize("written", ["", "\n"])
def test_an_empty_output_is_a_text_block(folder: str, written: str) -> None:
    answer = Server(folder, written, reasoning_parser=None).post(ASK, PATH).json()
    assert answer["content"] == [{"type": "text", "text": written}]


def test_a_conversation_with_results_of_tools_becomes_messages() -> None:
    text = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [text, {"type": "document", "source": {"type": "text", "data": "c"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text,
                use,
                {**use, "id": "t2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [text]},
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "And now?"},
            ],
        },
        {"role": "assistant", "content": "Now"},
        {"role": "assistant", "content": [{"type": "text", "text": "we"}]},
    ]
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    assert chat_messages(messages) == [
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": "b",
            "reasoning": "hm",
            "tool_calls": [{"id": name, "type": "function", "function": function} for name in ("t1", "t2")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny", "name": "weather"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: b", "name": "weather"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Now\nwe"},
    ]
    chat = to_chat_request(MessagesRequest(messages=messages, max_tokens=1))
    assert chat.continue_final_message is True
    asked = to_chat_request(MessagesRequest(messages=messages[:4], max_tokens=1))
    assert asked.continue_final_message is False


def test_the_settings_of_a_request_become_those_of_a_chat_completion() -> None:
    def chat(**fields: Any) -> Any:
        return to_chat_request(
            MessagesRequest(messages=[{"role": "user", "content": "a"}], **{"max_tokens": 5, **fields})
        )

    billed = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be short."}]
    found = chat(system=billed, stop_sequences=["x"], top_k=3, thinking={"type": "enabled", "budget_tokens": 2000})
    assert found.messages[0] == {"role": "system", "content": "Be short."}
    assert (found.stop, found.top_k, found.max_tokens, found.thinking_token_budget) == (["x"], 3, 5, 2000)
    assert found.chat_template_kwargs["enable_thinking"] is True and found.include_reasoning is True
    assert chat().chat_template_kwargs["enable_thinking"] is False and chat().include_reasoning is False
    schema = {"type": "object"}
    formed = chat(output_config={"effort": "max", "format": {"type": "json_schema", "schema": schema}})
    assert formed.reasoning_effort == "high" and formed.response_format["json_schema"]["schema"] == schema
    choices = {
        "auto": ({"type": "auto"}, "auto"),
        "any": ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        "tool": ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
        "none": ({"type": "none"}, "none"),
    }
    for choice, expected in choices.values():
        made = chat(tools=[TOOL], tool_choice=choice)
        assert made.tool_choice == expected
        assert made.parallel_tool_calls is ("disable_parallel_tool_use" not in choice)
    [tool] = made.tools
    assert tool["function"] == {"name": "weather", "description": "d", "parameters": {"type": "object"}}


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


DEEP = json.loads("[" * 300 + "]" * 300)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages is missing"),
    ({"messages": []}, "messages is missing"),
    ({"messages": 5}, "messages must be an array or null, found an integer"),
    ({"messages": [{"role": [], "content": "x"}]}, r"messages[0].role"),
    ({"messages": [{"role": "user"}]}, r"messages[0].content must be"),
    ({"messages": [{"role": "user", "content": [5]}]}, r"messages[0].content[0] must be an object"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, r"content[0].name"),
    ({"messages": [{"role": "user", "content": "x"}] * 300}, "max_model_len"),
    ({"messages": [{"role": "user", "content": [{}] * (MAX_BLOCKS + 1)}]}, "messages may have"),
    ({"messages": [{"role": "user", "content": "word " * 400}]}, "max_model_len"),
    (block(type="image", source={"type": "base64"}), "source must be an object of type 'base64' with data"),
    (block(type="document", source=DEEP), "not plain text"),
    (block(type="server_tool_use"), "'server_tool_use'"),
    (block(type="text", text=None), "content[0].text must be a text"),
    (block(type="tool_result", tool_use_id=1), "tool_use_id"),
    ({"system": [{"type": "image"}]}, "system[0] has the type 'image'"),
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens must be an integer"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": [""]}, "stop"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "x" * 200, "input_schema": {}}]}, "name"),
    ({"tool_choice": {"type": "function"}}, "tool_choice must be"),
    ({"tool_choice": {"type": "tool", "name": "other"}}, "'other'"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "disable_parallel_tool_use"),
    ({"thinking": {"type": DEEP}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": True}}, "budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1 << 63}}, "budget_tokens must be an integer from 1 to"),
    ({"output_config": {"effort": ["high"]}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}, "tools": None}, "output_config"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"container": "c"}, "container is not supported"),
    ({"model": "nobody"}, "`nobody` does not exist"),
]


def test_errors_have_the_format_of_the_api_and_name_the_field(folder: str) -> None:
    bodies = [{**ASK, **more, "stream": stream} for stream in (False, True) for more, _ in REFUSED]
    answers = Server(folder, "Hello.").exchange(*(("POST", PATH, body) for body in bodies))
    for answer, body, (_, message) in zip(answers, bodies, [*REFUSED, *REFUSED], strict=True):
        found = answer.json()
        is_missing = body.get("model") == "nobody"
        assert answer.status_code == (404 if is_missing else 400), (body, answer.text)
        assert found["type"] == "error" and found["request_id"] == answer.headers["request-id"]
        assert found["error"]["type"] == ("not_found_error" if is_missing else "invalid_request_error")
        assert message in found["error"]["message"], (body, answer.text)


def test_every_error_of_its_paths_has_the_format_of_the_api(folder: str) -> None:
    server = Server(folder, "Hello.")
    server.settings = replace(server.settings, api_keys=("mine",))
    requests = (("POST", PATH, ASK), ("GET", PATH, None), ("POST", f"{PATH}/batches", ASK), ("POST", COUNT, {}))
    unauthorized, method, path, body = server.exchange(*requests, keys=["wrong", "mine", "mine", "mine"])
    assert unauthorized.status_code == 401 and unauthorized.json()["error"]["type"] == "authentication_error"
    assert method.status_code == 405 and method.json()["type"] == "error"
    assert path.status_code == 404 and path.json()["error"]["type"] == "not_found_error"
    assert body.status_code == 400 and body.json()["error"]["message"].startswith("messages is missing")
    [accepted] = server.exchange(("POST", PATH, ASK), headers={"x-api-key": "mine"})
    assert accepted.status_code == 200


def test_an_error_in_a_stream_is_an_event(folder: str) -> None:
    answer = Server(folder, "Hello.", FinishReason.ERROR).post({**ASK, "stream": True}, PATH)
    *_, last = events(answer.text)
    assert last["type"] == "error" and last["error"]["type"] == "api_error"


def test_fields_of_the_service_have_no_effect(folder: str) -> None:
    hints = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "a_field_of_tomorrow": [1],
    }
    server = Server(folder, "Hello.")
    server.settings = replace(server.settings, unknown_fields="warn")
    headers = {"anthropic-beta": "a,b", "anthropic-version": "2023-06-01"}
    [answer] = server.exchange(("POST", f"{PATH}?beta=true", {**ASK, **hints}), headers=headers)
    assert answer.status_code == 200 and answer.headers["x-mvllm-unknown-fields"] == "a_field_of_tomorrow"


def test_tokens_are_counted_as_the_message_would_have_them(folder: str) -> None:
    server = Server(folder, "Hello.")
    ask = {key: value for key, value in ASK.items() if key != "max_tokens"}
    made, counted = server.exchange(("POST", PATH, ASK), ("POST", COUNT, ask))
    assert counted.json() == {"input_tokens": made.json()["usage"]["input_tokens"]}
    long = server.post({**ask, "messages": [{"role": "user", "content": "word " * 400}]}, COUNT)
    assert long.json()["input_tokens"] > 256  # more than the context; so a client learns that it is too long


def test_models_are_listed_in_the_format_of_the_client(folder: str) -> None:
    server = Server(folder, "Hello.")
    requests = (("GET", "/v1/models", None), ("GET", "/v1/models/m", None))
    theirs, one = server.exchange(*requests, headers={"anthropic-version": "2023-06-01"})
    plain, plain_one = server.exchange(*requests)
    [entry] = theirs.json()["data"]
    assert theirs.json()["has_more"] is False and theirs.json()["first_id"] == theirs.json()["last_id"] == "m"
    assert (entry["type"], entry["id"], entry["display_name"]) == ("model", "m", "m")
    assert entry["max_input_tokens"] == 256 and one.json() == entry
    assert plain.json()["object"] == "list" and plain_one.json()["object"] == "model"


def test_a_stream_has_pings_while_its_first_token_takes_long(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_api, "PING_SECONDS", 0.01)
    server = Server(folder, "Hello.")
    write = server.core.write

    def write_late(request_id: str, ids: list[int]) -> None:
        server.core.write = write  # type: ignore[method-assign]
        server.core.loop.call_later(0.2, write, request_id, ids)

    server.core.write = write_late  # type: ignore[method-assign]
    kinds = [event["type"] for event in events(server.post({**ASK, "stream": True}, PATH).text)]
    start = kinds.index("content_block_start")
    assert kinds[0] == "message_start" and set(kinds[1:start]) == {"ping"} and start > 4


def test_waiting_can_be_given_up() -> None:
    """A client leaves before the first token."""
    closed = []

    async def never() -> Any:
        try:
            await asyncio.sleep(60)
            yield 1
        finally:
            closed.append(True)

    async def run() -> None:
        items = messages_api._none_while_waiting(never(), 0.01)
        assert await anext(items) is None
        await items.aclose()

    asyncio.run(run())
    assert closed == [True]


def test_arguments_that_are_no_object_are_kept_as_text() -> None:
    assert arguments_object('{"a": 1}') == {"a": 1} and arguments_object("") == {}
    for text in ('{"a": ', "[1]", "5", "[" * 10_000):
        assert arguments_object(text) == {"INVALID_JSON": text}


def test_a_model_without_a_tool_parser_refuses_tools(folder: str) -> None:
    answer = Server(folder, "Hello.", tool_parser=None).post(ASK, PATH)
    assert answer.status_code == 400 and "--tool-call-parser" in answer.json()["error"]["message"]
    with pytest.raises(RequestError, match="mcp_servers"):
        to_chat_request(MessagesRequest(messages=[], mcp_servers=[{}]))
