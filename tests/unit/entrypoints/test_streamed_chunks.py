"""Chunks that a stream writes to its connection at once have the bytes of those that go through the application."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from mvllm.entrypoints.openai.common.json_response import encode_json
from mvllm.entrypoints.openai.common.streaming_response import RequestConnection
from mvllm.messages.requests import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PositionLogprobs,
)
from tests.unit.entrypoints.builders import TOKENIZER, save_model_folder
from tests.unit.entrypoints.scripted_server import TEMPLATE, ScriptedCore, Server

ODD = (
    'She said "hi" \\ / </script>\b\f\n\r\t\x00\x1b\x1f\x7f\x85 \u2028\u2029 \ufeff \u00e9e\u0301 \ufffd '
    "\U0001f469\u200d\U0001f680 \U00010348 \ud7ff\ue000 {}"
)
"""Quotes, control characters, line separators, characters beside and outside the range of surrogates, one of several
tokens, and U+FFFD itself."""
TOOL_CALL = (
    '<think>Hm, "\u00e9".</think>So.'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Z\u00fcrich"}}\n</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CHAT, PROMPT = {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class SteppedCore(ScriptedCore):
    """Generates the next token of all sequences when their last ones are in a chunk, so that chunks are the same."""

    transfer_params: dict[str, Any] | None = None
    unfinished: ClassVar[dict[str, list[int]]] = {}

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        new = {each.request_id: TOKENIZER.encode(self.text, add_special_tokens=False) for each in requests}
        self.unfinished = {**self.unfinished, **new}
        self.with_logprobs = requests[0].sampling_params.logprobs is not None
        self.loop.call_soon(self.step)

    def step(self) -> None:
        states = self.on_outputs.__self__._output_processor.requests
        if not any(each.has_new_output for each in states):
            outputs = []
            for request_id, ids in list(self.unfinished.items()):
                token_id, reason = (ids.pop(0), None) if ids else (TOKENIZER.eos_token_id or 0, self.reason)
                if reason is not None:
                    del self.unfinished[request_id]
                logprobs = [PositionLogprobs([token_id], [-0.5], 1)] if self.with_logprobs else None
                params = None if reason is None else self.transfer_params
                outputs.append(
                    EngineCoreOutput(request_id, [token_id], reason, logprobs=logprobs, kv_transfer_params=params)
                )
            self.on_outputs(EngineCoreOutputs(outputs))
        if self.unfinished:
            self.loop.call_later(0.001, self.step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.mark.parametrize(
    ("text", "body"),
    [
        (ODD, PROMPT),
        (ODD, {**PROMPT, **USAGE, "n": 2, "logprobs": 0, "return_token_ids": True}),
        (ODD, CHAT),
        (ODD, {**CHAT, "stream_options": {"include_usage": True}, "stop": ["{}"]}),
        (ODD, {**CHAT, **USAGE, "logprobs": True}),
        (TOOL_CALL, {**CHAT, "tools": TOOLS}),
    ],
    ids=["completion", "completion-with-all", "chat", "chat-with-stop", "chat-with-logprobs", "chat-with-tools"],
)
def test_chunks_are_the_same_in_both_ways(
    folder: str, text: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    parsers = {} if text is TOOL_CALL else {"tool_parser": None, "reasoning_parser": None}
    num_written = 0
    write_chunk = RequestConnection.write_chunk.fget
    assert write_chunk is not None

    def count(connection: RequestConnection) -> Any:
        nonlocal num_written
        write = write_chunk(connection)
        num_written += write is not None
        return write

    monkeypatch.setattr(RequestConnection, "write_chunk", property(count))
    found = []
    for way in ("connection", "application"):
        server = Server(folder, text, **parsers)
        server.core = SteppedCore(server.core.config, text, FinishReason.STOP)
        if way == "connection":
            found.append(server.post_over_connection({**body, "stream": True}, path))
        else:
            found.append(server.post({**body, "stream": True}, path).content)
    at_once, through_application = (re.sub(rb'"id":"[^"]*"|"created":\d+|call_\w+', b"", each) for each in found)
    assert at_once == through_application and num_written > 10
    events = [json.loads(event.removeprefix(b"data: ")) for event in found[0].split(b"\n\n")[:-2]]
    assert b"".join(b"data: " + encode_json(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n" == found[0]
    if text is ODD:
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
        written = "".join(
            choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices
        )
        assert written == text.removesuffix("{}" if "stop" in body else "")


@pytest.mark.parametrize(
    "body",
    [
        {**PROMPT, "prompt": ["a", "b"]},
        {**PROMPT, **USAGE},
        {**CHAT, "n": 2},
        {**CHAT, "stream_options": {"include_usage": True}},
    ],
    ids=["two prompts", "usage in all chunks", "two choices", "usage at the end"],
)
@pytest.mark.parametrize("params", [None, {"do_remote_prefill": True, "remote_host": "a\u00e9"}], ids=["none", "some"])
def test_the_chunk_that_ends_the_first_prompt_has_the_kv_transfer_params(
    folder: str, body: dict[str, Any], params: dict[str, Any] | None
) -> None:
    server = Server(folder, "Hello you", tool_parser=None, reasoning_parser=None)
    server.core = SteppedCore(server.core.config, "Hello you", FinishReason.LENGTH)
    server.core.transfer_params = params
    content = server.post(
        {**body, "stream": True}, "/v1/chat/completions" if "messages" in body else "/v1/completions"
    ).content
    events = [json.loads(event.removeprefix(b"data: ")) for event in content.split(b"\n\n")[:-2]]
    with_params = [event for event in events if "kv_transfer_params" in event]
    if params is None:
        assert not with_params
        return
    [event] = with_params
    assert event["kv_transfer_params"] == params
    ends = [each for each in events if each["choices"] and each["choices"][0]["finish_reason"] is not None]
    of_first_prompt = [each for each in ends if each["choices"][0]["index"] == 0 or body.get("n") == 2]
    assert event is of_first_prompt[-1] and len(ends) == (2 if "n" in body or body.get("prompt") == ["a", "b"] else 1)


def test_the_usage_of_two_choices_counts_no_token_before_it_is_sent(folder: str) -> None:
    server = Server(folder, "Hello you", tool_parser=None, reasoning_parser=None)
    server.core = SteppedCore(server.core.config, "Hello you", FinishReason.LENGTH)
    content = server.post({**CHAT, **USAGE, "n": 2, "stream": True}, "/v1/chat/completions").content
    events = [json.loads(event.removeprefix(b"data: ")) for event in content.split(b"\n\n")[:-2]]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] > 2
