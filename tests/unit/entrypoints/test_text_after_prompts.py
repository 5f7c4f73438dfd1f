"""Texts of all APIs follow that of the prompt, with tokenizers whose decoder drops the space of the first word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mvllm.messages.requests import EngineCoreOutput, FinishReason, PositionLogprobs
from tests.unit.engine.tokenizers import make_tokenizer
from tests.unit.entrypoints.builders import save_model_folder
from tests.unit.entrypoints.scripted_server import ScriptedCore, Server

KIND = "marks_first"
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "What is it?"}
BEGUN = {"role": "assistant", "content": "It is"}
CHAT, COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
ANSWER = "a small text"  # its first token is a word with a mark


class ScoredCore(ScriptedCore):
    """An engine core that sends log-probabilities."""

    def send(self, output: EngineCoreOutput) -> None:
        (request,) = self.requests
        scored = [PositionLogprobs([i], [-1.0], 1) for i in (*request.prompt_token_ids[1:], *output.new_token_ids)]
        num_new, params = len(output.new_token_ids), request.sampling_params
        output.logprobs = scored[len(scored) - num_new :] if params.logprobs is not None else None
        output.prompt_logprobs = scored[: len(scored) - num_new] if params.prompt_logprobs is not None else None
        super().send(output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE, KIND)


def make_server(folder: str) -> Server:
    server = Server(folder, ANSWER, FinishReason.LENGTH, reasoning_parser=None)
    server.core = ScoredCore(server.core.config, ANSWER, FinishReason.LENGTH)
    server.core.tokenizer = make_tokenizer(KIND)
    return server


def streamed(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
    return [json.loads(line) for line in lines]


def text_of(path: str, body: dict[str, Any], stream: bool) -> str:
    """The text in a response, or in all events of a stream."""
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in body["choices"])
    return "".join((c["delta"] if stream else c["message"]).get("content") or "" for c in body["choices"])


REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "completion": (COMPLETIONS, {"prompt": "It is"}, " a small text"),
    "completion of token ids": (COMPLETIONS, {"prompt": [1, 300]}, " a small text"),
    "completion of BOS": (COMPLETIONS, {"prompt": [1]}, "a small text"),
    "echo": (COMPLETIONS, {"prompt": "It is", "echo": True}, "It is a small text"),
    "stop string": (COMPLETIONS, {"prompt": "It is", "stop": [" small"]}, " a"),
    "chat": (CHAT, {"messages": [USER]}, " a small text"),
    "continued chat": (
        CHAT,
        {"messages": [USER, BEGUN], "add_generation_prompt": False, "continue_final_message": True},
        " a small text",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_first_word_keeps_its_space(folder: str, name: str, stream: bool) -> None:
    path, body, expected = REQUESTS[name]
    answer = make_server(folder).post({**body, "stream": stream}, path)
    assert answer.status_code == 200, answer.text
    bodies = streamed(answer.text) if stream else [answer.json()]
    assert "".join(text_of(path, each, stream) for each in bodies) == expected


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("prompt", ["It is", "<s>It is </s> and</s>it is", [1, 300, 2, 301]], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_offsets_of_an_echoed_prompt_and_its_output(folder: str, prompt: Any, stream: bool, skip: bool) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "skip_special_tokens": skip, "stream": stream}
    answer = make_server(folder).post(body, COMPLETIONS)
    choices = [c for each in (streamed(answer.text) if stream else [answer.json()]) for c in each["choices"]]
    text = "".join(choice["text"] for choice in choices)
    assert text.endswith(" a small text") and (not isinstance(prompt, str) or text.startswith(prompt))
    lists = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    pairs = [pair for part in lists for pair in zip(part["tokens"], part["text_offset"], strict=True)]
    for token, offset in pairs:
        if token not in ("<s>", "</s>") or (isinstance(prompt, str) and token == "</s>"):
            assert text[offset:].startswith((token, token.lstrip()))
    output = [offset for token, offset in pairs if token == " a"][-1]
    assert text[output:] == " a small text"
    assert [offset for _, offset in pairs] == sorted(offset for _, offset in pairs)


def test_log_probabilities_of_a_chat_have_the_text_of_its_content(folder: str) -> None:
    [choice] = make_server(folder).post({"messages": [USER], "logprobs": True}).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"] == " a small text"
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == " a small text"
