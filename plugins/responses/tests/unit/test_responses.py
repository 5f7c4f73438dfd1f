"""Responses: reasoning, text and calls become items; items become messages; and the store is bounded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from plugins.responses.tests.builders import server_settings

from mvllm.entrypoints.openai.common.chat_prompt_renderer import MAX_TOOLS
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.errors import RequestError
from mvllm.messages.requests import FinishReason
from mvllm_responses.input_items import MessageBuilder, items_to_messages, to_chat_request
from mvllm_responses.items import MAX_ITEMS
from mvllm_responses.protocol import ResponsesRequest
from mvllm_responses.settings import ResponsesSettings
from tests.unit.entrypoints.builders import TOKENIZER, save_model_folder
from tests.unit.entrypoints.scripted_server import TEMPLATE, Server

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        {**TOOL, "name": "find", "description": "Finds one.", "defer_loading": True},
        {**TOOL, "name": "weather"},
    ],
}
THOUGHT = "<think>It may rain.</think>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK: dict[str, Any] = {"input": "What is the weather?", "tools": [TOOL]}


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
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        hidden = ("id", "item_id", "call_id", "created_at", "completed_at")
        return {key: without_ids(inner) for key, inner in value.items() if key not in hidden}
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


def test_reasoning_text_and_a_call_are_three_items(folder: str) -> None:
    server = Server(folder, f"{THOUGHT}Let me see.{CALL}")
    answer = server.post(ASK, PATH).json()
    assert answer["status"] == "completed" and answer["object"] == "response"
    thought, message, call = answer["output"]
    assert thought["type"] == "reasoning" and thought["content"] == [{"type": "reasoning_text", "text": "It may rain."}]
    assert message["content"] == [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Paris"}')
    assert call["call_id"].startswith("call_") and call["id"].startswith("fc_")
    assert {item["status"] for item in answer["output"]} == {"completed"}
    usage = answer["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == len(
        TOKENIZER.encode(THOUGHT, add_special_tokens=False)
    )
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert server.core.prompts == ["user: What is the weather?weather "]


def test_a_stream_has_events_of_the_same_items_in_the_order_of_the_api(folder: str) -> None:
    server = Server(folder, f"{THOUGHT}Let me see.{CALL}")
    whole, streamed = (server.post({**ASK, "stream": stream}, PATH) for stream in (False, True))
    found = events(streamed.text)
    kinds = [event["type"].removeprefix("response.") for event in found]
    deltas = [kind for kind in kinds if kind.endswith(".delta")]
    assert [kind for kind in kinds if kind not in deltas] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert found[0]["response"]["status"] == found[1]["response"]["status"] == "in_progress"
    final = found[-1]["response"]
    assert without_ids(final) == without_ids(whole.json())
    for index, item in enumerate(final["output"]):
        mine = [event for event in found if event.get("output_index") == index]
        text = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
        assert mine[-1]["item"] == item
    assert len(deltas) > 6  # delta by delta


def test_a_response_truncated_within_its_reasoning(folder: str) -> None:
    server = Server(folder, "<think>It may", FinishReason.LENGTH)
    answer = server.post(ASK, PATH).json()
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    [thought] = answer["output"]
    assert (thought["type"], thought["status"]) == ("reasoning", "incomplete")
    usage = answer["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == usage["output_tokens"] > 0
    assert events(server.post({**ASK, "stream": True}, PATH).text)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("written", ["", " ", "\n"])
def test_an_empty_output_is_a_message(folder: str, written: str) -> None:
    answer = Server(folder, written, reasoning_parser=None).post(ASK, PATH).json()
    [item] = answer["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == written


def test_a_conversation_continues_with_all_earlier_messages(folder: str) -> None:
    server = Server(folder, f"{THOUGHT}{CALL}")
    result = {"type": "function_call_output", "call_id": "any", "output": "sunny"}
    first, second, _ = server.exchange(
        ("POST", PATH, {**ASK, "instructions": "Be short."}),
        ("POST", PATH, {**ASK, "input": [result], "previous_response_id": "{id}"}),
        ("POST", PATH, {"input": "Thanks.", "previous_response_id": "{id}"}),
    )
    assert first.status_code == second.status_code == 200
    assert server.core.prompts[0] == "system: Be short.user: What is the weather?weather "
    # Instructions apply to one turn. The template renders the arguments of calls.
    assert server.core.prompts[1] == "user: What is the weather?assistant: Paristool: sunnyweather "
    last = "user: What is the weather?assistant: Paristool: sunnyassistant: Parisuser: Thanks."
    assert server.core.prompts[2] == last


def test_a_continued_conversation_keeps_its_cache_salt(folder: str) -> None:
    server = Server(folder, "Hello.")
    on = {"input": "Thanks.", "previous_response_id": "{id}"}
    answers = server.exchange(
        ("POST", PATH, {**ASK, "cache_salt": "mine"}),
        ("POST", PATH, on),
        ("POST", PATH, on),
        ("POST", PATH, {**on, "cache_salt": "other"}),
        ("POST", PATH, ASK),
    )
    assert {answer.status_code for answer in answers} == {200}
    assert [request.cache_salt for request in server.core.requests] == ["mine", "mine", "mine", "other", None]


def test_a_stored_response_can_be_read_until_it_is_deleted(folder: str) -> None:
    server = Server(folder, "Hello.")
    made, shown, again, gone, missing, late = server.exchange(
        ("POST", PATH, {**ASK, "metadata": {"a": "b"}}),
        ("GET", f"{PATH}/{{id}}", None),
        ("GET", f"{PATH}/{{id}}?stream=false", None),
        ("DELETE", f"{PATH}/{{id}}", None),
        ("GET", f"{PATH}/{{id}}", None),
        ("POST", PATH, {**ASK, "previous_response_id": "resp_0"}),
    )
    assert (
        shown.json() == again.json() == made.json()
        and made.json()["store"] is True
        and made.json()["metadata"] == {"a": "b"}
    )
    assert gone.json() == {"id": made.json()["id"], "object": "response", "deleted": True}
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "response_not_found"
    error = late.json()["error"]
    assert late.status_code == 400 and error["param"] == "previous_response_id"
    assert error["code"] == "previous_response_not_found"


def test_a_stored_response_cannot_be_streamed(folder: str) -> None:
    _, answer = Server(folder, "Hello.").exchange(("POST", PATH, ASK), ("GET", f"{PATH}/{{id}}?stream=true", None))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream"


def test_a_finished_response_cannot_be_cancelled(folder: str) -> None:
    _, answer = Server(folder, "Hello.").exchange(("POST", PATH, ASK), ("POST", f"{PATH}/{{id}}/cancel", None))
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "response_ended"


@pytest.mark.parametrize("off", ["by the request", "by the server"])
def test_nothing_is_stored_with_store_false_or_a_limit_of_0(folder: str, off: str) -> None:
    server = Server(folder, "Hello.")
    if off == "by the server":
        server.settings = server_settings(ResponsesSettings(max_stored_responses=0))
    ask = {**ASK, "store": False} if off == "by the request" else ASK
    made, shown = server.exchange(("POST", PATH, ask), ("GET", f"{PATH}/{{id}}", None))
    assert made.json()["store"] is False and shown.status_code == 404


def test_the_output_format_is_read_from_text_and_errors_name_text(folder: str) -> None:
    server = Server(folder, "Hello.")
    for text in (
        {"format": {"type": "made up"}},
        {"format": {"type": "json_schema"}},
        {"format": {"type": "json_schema", "schema": 5}},
        {"format": {"type": "json_schema", "schema": {"properties": {}, "additionalProperties": True}, "strict": True}},
        {"format": "json"},
        {"verbosity": "high"},
    ):
        error = server.post({**ASK, "tools": None, "text": text}, PATH)
        assert error.status_code == 400 and error.json()["error"]["param"] == "text", text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"role": "user"}]}, "input"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input"),
    ({"input": [{"type": "reasoning", "content": [{"text": 5}]}]}, "input"),
    ({"input": "word " * 400}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [{**NAMESPACE, "name": "a b"}]}, "tools"),
    ({"tools": [{**NAMESPACE, "tools": None}]}, "tools"),
    ({"tools": [{**NAMESPACE, "tools": [{"type": "function", "name": "x y"}]}]}, "tools"),
    ({"tools": [NAMESPACE, NAMESPACE]}, "tools"),
    ({"tools": [NAMESPACE, {**TOOL, "name": "crm__find"}]}, "tools"),
    ({"tools": [{**TOOL, "name": ["x"]}]}, "tools"),
    ({"input": [{"type": "function_call", "name": "x", "arguments": "", "call_id": "1", "namespace": 5}]}, "input"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": "required", "tools": None}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "weather", "x": json.loads("[" * 200 + "]" * 200)}}, "tool_choice"),
    ({"include": ["everything"]}, "include"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"truncation": "middle"}, "truncation"),
    ({"background": True, "store": False}, "background"),
    ({"conversation": {"name": "x"}}, "conversation"),
    ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
    ({"input": [{"type": "mcp_approval_response", "approval_request_id": "x", "approve": True}]}, "input"),
    ({"input": [{"type": "mcp_call", "server_label": "x", "name": "y"}]}, "input"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"reasoning": {"effort": 5}}, "reasoning"),
    ({"text": {"format": {"type": "text", "extra": json.loads('{"a":' * 200 + "1" + "}" * 200)}}}, "text"),
    ({"input": [{}] * (MAX_ITEMS + 1)}, "input"),
    ({"input": [{"role": "user", "content": "x"}] * 300}, "input"),
    ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools"),
    ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
    ({"metadata": {"x": "x" * 513}}, "metadata"),
    ({"metadata": {"x" * 65: "x"}}, "metadata"),
    ({"tools": [{**TOOL, "parameters": json.loads('{"a":' * 200 + "1" + "}" * 200)}]}, "tools"),
]


def test_invalid_fields_are_rejected_by_their_names_in_the_request(folder: str) -> None:
    bodies = [{**ASK, **more, "stream": stream} for stream in (False, True) for more, _ in REFUSED]
    answers = Server(folder, "Hello.").exchange(*(("POST", PATH, body) for body in bodies))
    for answer, body, (_, param) in zip(answers, bodies, [*REFUSED, *REFUSED], strict=True):
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["error"]["param"] == param, (body, answer.text)


def test_functions_of_a_namespace_have_qualified_names_for_the_model_and_their_own_for_the_client(folder: str) -> None:
    call = CALL.replace("weather", "crm__weather")
    server = Server(folder, call + CALL)
    body = {**ASK, "tools": [TOOL, NAMESPACE]}
    whole, streamed = (server.post({**body, "stream": stream}, PATH) for stream in (False, True))
    one, other = whole.json()["output"]
    assert (one["namespace"], one["name"], one["arguments"]) == ("crm", "weather", '{"city": "Paris"}')
    assert other["name"] == "weather" and "namespace" not in other
    assert whole.json()["tools"] == [{**TOOL, "description": None, "strict": False}, NAMESPACE]
    found = [event["item"] for event in events(streamed.text) if event["type"] == "response.output_item.done"]
    assert without_ids(found) == without_ids([one, other])
    [message] = items_to_messages([one])  # as in the input of the next request
    assert message["tool_calls"][0]["function"]["name"] == "crm__weather"


def test_the_model_gets_the_functions_of_a_namespace() -> None:
    request = ResponsesRequest(
        input="x", tools=[TOOL, NAMESPACE], tool_choice={"type": "function", "namespace": "crm", "name": "find"}
    )
    chat = to_chat_request(request, [])
    assert chat.tool_choice == {"type": "function", "function": {"name": "crm__find"}}
    assert [tool["function"] for tool in chat.tools or ()] == [
        {"name": "weather", "parameters": {"type": "object"}},
        {"name": "crm__find", "description": "Customers.\n\nFinds one.", "parameters": {"type": "object"}},
        {"name": "crm__weather", "parameters": {"type": "object"}},
    ]


def test_tools_that_the_server_does_not_run_are_left_out_and_named_in_a_header(folder: str) -> None:
    """Agents send them beside functions, and do without them."""
    kinds = ["web_search", "file_search", "image_generation", "custom", "tool_search", "local_shell"]
    namespace = {**NAMESPACE, "tools": [{"type": "custom", "name": "x"}, *NAMESPACE["tools"]]}
    body = {**ASK, "tools": [TOOL, *({"type": kind} for kind in kinds), namespace]}
    plain = Server(folder, CALL)
    plain.post({**ASK, "tools": [TOOL, NAMESPACE]}, PATH)
    server = Server(folder, CALL)
    for answer in (server.post({**body, "stream": stream}, PATH) for stream in (False, True)):
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-mvllm-unknown-fields"] == ", ".join(f"tools.{kind}" for kind in kinds)
    assert server.core.prompts == plain.core.prompts * 2
    server.settings = ServerSettings(unknown_fields="refuse")
    refused = server.post(body, PATH).json()["error"]
    assert refused["code"] == "unknown_field" and refused["param"] == "tools.web_search"
    for choice in ({"type": "web_search"}, {"type": "custom", "name": "x"}):
        error = Server(folder, "x").post({**body, "tool_choice": choice}, PATH)
        assert error.status_code == 400 and error.json()["error"]["param"] == "tool_choice"


def test_metadata_fields_have_no_effect(folder: str) -> None:
    hints = {
        "include": ["reasoning.encrypted_content"],
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "user": "u",
        "truncation": "disabled",
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }
    assert Server(folder, "Hello.").post({**ASK, **hints}, PATH).json()["status"] == "completed"


def test_items_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {**call, "call_id": "c3"},
    ]
    system, user, turn, one, two, again = items_to_messages(items)
    assert system == {"role": "system", "content": "a\nb"} and user == {"role": "user", "content": "hello"}
    assert (turn["content"], turn["reasoning"]) == ("wait", "hm")
    assert [each["id"] for each in turn["tool_calls"]] == ["c1", "c2"]
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert one == {"role": "tool", "tool_call_id": "c1", "content": "1"} and two["content"] == "2"
    assert again["content"] is None and again["tool_calls"][0]["id"] == "c3" and "reasoning" not in again
    with pytest.raises(RequestError, match=r"input\[0\] has the type 'web_search_call'"):
        items_to_messages([{"type": "web_search_call"}])


def test_a_response_is_not_found_with_another_key(folder: str) -> None:
    server = Server(folder, "Hello.")
    server.settings = replace(server.settings, api_keys=("mine", "another"), admin_api_keys=("boss",))

    def accesses(of: str) -> list[tuple[str, str, dict[str, Any] | None]]:
        shown, on = ("GET", f"{PATH}/{of}", None), ("POST", PATH, {**ASK, "previous_response_id": of})
        return [shown, ("POST", f"{PATH}/{of}/cancel", None), ("DELETE", f"{PATH}/{of}", None), on]

    shown, cancelled, deleted, on = accesses("{id}")
    theirs = ["another"] * 4
    made, *refused, mine, boss, more = server.exchange(
        ("POST", PATH, ASK),
        shown,
        cancelled,
        deleted,
        on,
        shown,
        shown,
        on,
        keys=["mine", *theirs, "mine", "boss", "mine"],
    )
    missing = server.exchange(*accesses("resp_0"), keys=theirs)
    assert [(a.status_code, a.json()) for a in refused] == [(a.status_code, a.json()) for a in missing]
    assert mine.json() == boss.json() == made.json() and more.status_code == 200


def test_a_call_of_a_tool_server_is_a_call_and_its_result_under_the_name_that_the_model_knows() -> None:
    call = {"type": "mcp_call", "id": "mcp_1", "server_label": "a", "name": "find", "arguments": "{}", "output": "x"}
    builder = MessageBuilder()
    builder.add([call])
    builder.set_function_names({("a", "find"): "a__find"})
    builder.add([{**call, "id": "mcp_2", "error": {"type": "http_error", "code": 404, "message": "gone"}}])
    first, result, second, error = builder.messages
    assert [each["tool_calls"][0]["function"]["name"] for each in (first, second)] == ["a__find", "a__find"]
    assert (result["content"], error["content"]) == ("x", "Error: gone")
