"""Tools of MCP servers in responses: a real tool server, as a program and over HTTP, and a scripted model."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from plugins.responses.tests.builders import server_settings

from mvllm.errors import RequestError
from mvllm.multimodal import public_addresses
from mvllm_responses.mcp.connection import MCPConnection, MCPServerError
from mvllm_responses.mcp.functions import MCPTool, function_names, parse_mcp_tools, redacted_tools
from mvllm_responses.settings import MCPServerConfig, MCPSettings, ResponsesSettings
from tests.helpers.ports import free_port, listens
from tests.helpers.processes import wait_until
from tests.unit.entrypoints.builders import save_model_folder
from tests.unit.entrypoints.live_server import CONVERSATION_TEMPLATE, LiveServer, live_server

pytest.importorskip("mcp", reason="needs the package mcp, the extra mcp of mvllm")
import httpx2

from mvllm_responses.mcp import transport as mcp_transport
from mvllm_responses.mcp.transport import ToolServerTransport

PROGRAM = (sys.executable, str(Path(__file__).with_name("mcp_tools_server.py")))
CITIES: dict[str, Any] = {"type": "mcp", "server_label": "cities", "require_approval": "never"}
WEATHER = {"type": "function", "name": "ask_user", "parameters": {"type": "object"}}
NUM_CALLS = 3


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = {
    "weather": "Let me see." + call("weather", city="Rome"),
    "fail": call("fail", city="Atlantis"),
    "slow": call("slow", seconds=30),
    "large": call("large", size=10_000),
    "leave": call("leave"),
    "unknown": call("nothing"),
    "two": call("weather", city="Rome") + call("weather", city="Oslo"),
    "both": call("weather", city="Rome") + call("ask_user"),
    "endless": call("weather", city="Rome"),
}


def answer(prompt: str) -> str:
    first, *rest = prompt.split("|")
    question = first.removeprefix("user: ")
    if question == "endless" and prompt.rstrip().endswith("leave"):
        return "Stopped." if "limit" in prompt else CALLS["endless"]
    results = [part for part in rest if part.startswith("tool: ")]
    return f"I got {results[-1][6:][:40]}" if results else CALLS.get(question, "Hello.")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = save_model_folder(tmp_path_factory.mktemp("model"), CONVERSATION_TEMPLATE)
    config = Path(folder) / "config.json"  # with room for several turns
    config.write_text(config.read_text().replace('"max_position_embeddings": 256', '"max_position_embeddings": 4096'))
    port = free_port()
    with subprocess.Popen([*PROGRAM, str(port)]) as process:
        wait_until(lambda: process.poll() is not None or listens(port), 120, "the tool server listens")
        servers = (
            MCPServerConfig("cities", command=PROGRAM),
            MCPServerConfig("web", url=f"http://127.0.0.1:{port}/mcp"),
            MCPServerConfig("dead", url="http://127.0.0.1:9/mcp"),
        )
        mcp = MCPSettings(servers, "public", max_calls=NUM_CALLS, timeout=3.0, max_result_bytes=64, start_timeout=60.0)
        with live_server(folder, answer, server_settings(ResponsesSettings(mcp=mcp))) as server:
            yield server
        process.terminate()


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[OpenAI]:
    with server.sdk() as sdk:
        sdk.responses.create(model="m", input="start the program", tools=[CITIES])  # type: ignore[list-item]
        yield sdk


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


@pytest.mark.parametrize("label", ["cities", "web"])
def test_the_server_lists_the_tools_runs_the_call_and_the_model_answers(
    sdk: OpenAI, server: LiveServer, label: str
) -> None:
    tool = {**CITIES, "server_label": label, "allowed_tools": ["weather", "fail"]}
    made = sdk.responses.create(model="m", input="weather", tools=[tool])  # type: ignore[list-item]
    assert kinds(made) == ["mcp_list_tools", "message", "mcp_call", "message"] and made.status == "completed"
    listed, _, called, _ = made.output
    assert [each.name for each in listed.tools] == ["weather", "fail"]  # type: ignore[union-attr, misc]
    assert listed.tools[0].annotations == {"readOnlyHint": True}  # type: ignore[union-attr, misc, index]
    assert (called.name, called.server_label, called.status) == ("weather", label, "completed")  # type: ignore
    assert (called.arguments, called.output) == ('{"city": "Rome"}', "sunny in Rome")  # type: ignore[union-attr]
    assert made.output_text == "Let me see.I got sunny in Rome"
    assert made.usage is not None and made.usage.input_tokens > len(server.core.prompts[-1]) / 8
    # The next response has the list and the call from the conversation.
    on = sdk.responses.create(model="m", input="weather", tools=[tool], previous_response_id=made.id)  # type: ignore
    assert "mcp_list_tools" not in kinds(on)
    history = 'user: weather|assistant: Let me see.[weather {"city": "Rome"}]|tool: sunny in Rome|assistant: '
    assert server.core.prompts[-1].startswith(history)


def test_the_events_of_calls_come_in_the_order_of_the_api(sdk: OpenAI) -> None:
    events = list(sdk.responses.create(model="m", input="two", tools=[CITIES], stream=True))  # type: ignore[list-item]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    found = [event.type.removeprefix("response.") for event in events if not event.type.endswith(".delta")]
    one = ["output_item.added", "mcp_call.in_progress", "mcp_call_arguments.done"]
    assert found == [
        *("created", "in_progress", "output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed"),
        *("output_item.done", *one, *one),
        *["mcp_call.completed", "output_item.done"] * 2,
        *("output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    last = events[-1].response  # type: ignore[union-attr]
    assert [item.output for item in last.output[1:3]] == ["sunny in Rome", "sunny in Oslo"]
    deltas = [event.delta for event in events if event.type == "response.mcp_call_arguments.delta"]
    assert "".join(deltas) == '{"city": "Rome"}{"city": "Oslo"}'


def test_errors_of_tools_and_servers_are_items_and_the_model_is_told(sdk: OpenAI, server: LiveServer) -> None:
    def run(question: str, label: str = "cities") -> Any:
        return sdk.responses.create(model="m", input=question, tools=[{**CITIES, "server_label": label}])  # type: ignore

    failed = run("fail").output[1]
    assert failed.status == "failed" and failed.error.type == "mcp_tool_execution_error" and failed.output is None
    assert "tool: Error: Error executing tool fail" in server.core.prompts[-1]
    slow = run("slow").output[1]
    assert slow.error.type == "mcp_protocol_error" and "within 3 s" in slow.error.message
    left = run("leave").output[1]
    assert left.error.message == "Connection closed"
    large = run("large").output[1]  # the program is started again
    assert large.output == "x" * 64 + "\n[cut off: 64 of 10000 bytes]"
    unknown = run("unknown")
    assert kinds(unknown) == ["mcp_list_tools", "function_call"]  # no server has it: it is the client's
    dead = run("hello", "dead")
    assert dead.output[0].error == "All connection attempts failed" and dead.output_text == "Hello."


def test_a_call_that_needs_approval_waits_for_it(sdk: OpenAI, server: LiveServer) -> None:
    tool = {**CITIES, "require_approval": {"never": {"read_only": True}}}
    asked = sdk.responses.create(model="m", input="fail", tools=[tool])  # type: ignore[list-item]
    assert kinds(asked) == ["mcp_list_tools", "mcp_approval_request"] and asked.status == "completed"
    request = asked.output[1]
    assert (request.name, request.arguments) == ("fail", '{"city": "Atlantis"}')  # type: ignore[union-attr]

    def reply(approve: bool) -> Any:
        given = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve}
        ask: dict[str, Any] = {"input": [given], "previous_response_id": asked.id, "tools": [tool]}
        return sdk.responses.create(model="m", **ask)

    approved = reply(True)
    assert kinds(approved) == ["mcp_call", "message"]
    assert approved.output[0].approval_request_id == request.id and approved.output[0].status == "failed"
    denied = reply(False)
    assert kinds(denied) == ["message"] and "I got The user has not allowed this call." in denied.output_text
    assert kinds(sdk.responses.create(model="m", input="weather", tools=[tool])).count("mcp_call") == 1  # type: ignore
    again = sdk.responses.create(model="m", input="hi", previous_response_id=approved.id, tools=[tool])  # type: ignore
    assert "mcp_call" not in kinds(again)  # an approval is for one call


def test_functions_of_the_client_end_the_response_and_calls_are_limited(sdk: OpenAI) -> None:
    both = sdk.responses.create(model="m", input="both", tools=[CITIES, WEATHER])  # type: ignore[list-item]
    assert kinds(both) == ["mcp_list_tools", "mcp_call", "function_call"]
    for limit, allowed in ((None, NUM_CALLS), (1, 1)):
        more: dict[str, Any] = {} if limit is None else {"max_tool_calls": limit}
        made = sdk.responses.create(model="m", input="endless", tools=[CITIES], **more)  # type: ignore[call-overload]
        calls = [item for item in made.output if item.type == "mcp_call"]
        assert [item.status for item in calls] == ["completed"] * allowed + ["failed"]
        assert made.output_text == "Stopped."


def test_a_response_is_cancelled_while_its_tool_runs(sdk: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "m", "input": "slow", "tools": [CITIES], "background": True}
    made = sdk.responses.create(**ask)
    deadline = time.monotonic() + 120
    while not any(item.type == "mcp_call" for item in sdk.responses.retrieve(made.id).output):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sdk.responses.cancel(made.id)
    last = sdk.responses.retrieve(made.id)
    while last.output[-1].status == "in_progress" and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.01)
        last = sdk.responses.retrieve(made.id)
    assert last.status == "cancelled" and last.output[-1].status == "incomplete"  # type: ignore[union-attr]


def test_private_addresses_are_out_of_reach_of_requests(sdk: OpenAI, server: LiveServer) -> None:
    for host in ("127.0.0.1", "localhost", "[::1]", "10.0.0.1", "169.254.169.254", "2130706433", "[::ffff:127.0.0.1]"):
        tool = {**CITIES, "server_label": "mine", "server_url": f"http://{host}:{server.url.split(':')[-1]}/mcp"}
        made = sdk.responses.create(model="m", input="hello", tools=[tool])  # type: ignore[list-item]
        assert "not a public address" in str(made.output[0].error), host  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "address", ["168.63.129.16", "192.0.0.192", "fec0::1", "::ffff:169.254.169.254", "fd00:ec2::254"]
)
def test_tool_servers_have_the_filter_of_addresses_that_images_have(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `is_public` refuses is listed in tests/unit/multimodal/test_url_fetch.py."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 443)), (0, 0, 0, "", (address, 443))]
    monkeypatch.setattr(public_addresses.socket, "getaddrinfo", lambda *unused, **settings: found)

    async def get() -> None:
        async with httpx2.AsyncClient(transport=ToolServerTransport(public_only=True)) as client:
            await client.get("https://tools.test/mcp")

    with pytest.raises(httpx2.ConnectError, match="not a public address"):
        asyncio.run(get())


def test_responses_of_tool_servers_are_limited(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def get(*, public_only: bool) -> None:
        async with httpx2.AsyncClient(transport=ToolServerTransport(public_only=public_only)) as client:
            await client.get(f"{server.url}/openapi.json")

    monkeypatch.setattr(mcp_transport, "MAX_RESPONSE_BYTES", 1000)
    with pytest.raises(httpx2.ReadError, match="more than 1000 bytes"):
        asyncio.run(get(public_only=False))
    with pytest.raises(httpx2.ConnectError, match="not a public address"):
        asyncio.run(get(public_only=True))


def test_the_time_to_start_a_program_is_limited_apart_from_that_of_calls() -> None:
    silent = MCPServerConfig("silent", command=("sh", "-c", "read a; read b"))  # reads to the end, and answers nothing

    async def list_tools() -> None:
        connection = MCPConnection(MCPTool(silent, True), MCPSettings((silent,), timeout=60.0, start_timeout=0.3))
        try:
            await connection.list_tools()
        finally:
            connection.close()
            await connection.wait_closed()

    started = time.monotonic()
    with pytest.raises(MCPServerError, match=r"not started within 0\.3 s.*--mcp-start-timeout"):
        asyncio.run(asyncio.wait_for(list_tools(), 120))
    assert time.monotonic() - started < 50  # the limit of calls is 60


SETTINGS = MCPSettings((MCPServerConfig("a", url="https://a.example/mcp"), MCPServerConfig("b", command=("b",))))


@pytest.mark.parametrize(
    "tool",
    [
        {"server_label": "x"},
        {"server_label": "x", "server_url": "https://x.example"},
        {"server_label": "a", "server_url": "https://other.example"},
        {"server_label": "a b"},
        {"server_label": 5},
        {"server_label": "a", "connector_id": "connector_gmail"},
        {"server_label": "a", "require_approval": "sometimes"},
        {"server_label": "a", "require_approval": {"rarely": {}}},
        {"server_label": "a", "allowed_tools": "weather"},
        {"server_label": "a", "allowed_tools": [1]},
        {"server_label": "a", "headers": {"Host": "x"}},
        {"server_label": "a", "headers": {"X-A": "b\r\nX-C: d"}},
        {"server_label": "a", "headers": {"Authorization": "x"}, "authorization": "y"},
        {"server_label": "b", "authorization": "x"},
    ],
)
def test_a_server_that_is_not_valid_or_not_allowed_is_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as raised:
        parse_mcp_tools([{"type": "mcp", **tool}], SETTINGS)
    assert raised.value.parameter == "tools"


def test_secrets_are_neither_stored_nor_shown() -> None:
    tool = {"type": "mcp", "server_label": "a", "headers": {"X-Key": "secret"}, "authorization": "secret"}
    [parsed] = parse_mcp_tools([tool], SETTINGS)
    assert parsed.headers == {"X-Key": "secret", "Authorization": "Bearer secret"} and "secret" not in repr(parsed)
    url = {**tool, "server_url": "https://a.example/mcp?token=secret"}
    assert "secret" not in json.dumps(redacted_tools([tool, url]))


def test_functions_have_names_of_their_own() -> None:
    names = [("a", "search"), ("b", "search"), ("b", "read file"), ("b", "time")]
    assert list(function_names(names, ["time"])) == ["a__search", "b__search", "read_file", "b__time"]
