"""What users read after mistakes with `mvllm chat`, `run`, `show` and `pull`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.message_rows import Mistake, check_mistake, write_broken_models

NO_TEMPLATE = (
    "The model has no chat template, so a conversation cannot be turned into a prompt. Give one with --chat-template, "
    "or continue a text with `mvllm complete` or `mvllm generate`."
)
MISTAKES = [
    Mistake("chat {models}/no-template", NO_TEMPLATE),
    Mistake("run {models}/no-template hello", NO_TEMPLATE),
    Mistake(
        "chat demo --chat-template {{frob(messages)}}",
        "With three short messages, the chat template of --chat-template failed in line 1: UndefinedError: 'frob' is "
        "undefined. Correct it, or give another with --chat-template.",
    ),
    Mistake(
        "run {models}/bad-template hello",
        "The chat template {models}/bad-template/chat_template.jinja, line 2: Encountered unknown tag 'endfr'. Jinja "
        "was looking for the following tags: 'endfor' or 'else'. The innermost block that needs to be closed is 'for'.",
    ),
    Mistake(
        "chat {models}/bad-function",
        "With three short messages, the chat template {models}/bad-function/chat_template.jinja failed in line 2: "
        "UndefinedError: 'frob' is undefined. Correct it, or give another with --chat-template.",
    ),
    Mistake(
        "chat {models}/no-tokenizer",
        "{models}/no-tokenizer holds no tokenizer: none of tokenizer.json, tokenizer.model, vocab.json, spiece.model, "
        "tokenizer_config.json is there. Copy the tokenizer's files into it, or name a folder or model that has them "
        "with --tokenizer FOLDER.",
    ),
    Mistake(
        "chat demo --image {models}/none.png",
        "The picture '{models}/none.png' cannot be read: No such file or directory: {models}/none.png.",
    ),
    Mistake(
        "run demo hello --url http://127.0.0.1:9",
        "http://127.0.0.1:9 does not answer: Connection refused. Start a server there with `mvllm serve MODEL`, or "
        "check --url.",
    ),
    Mistake(
        "show {models}/t5",
        "{models}/t5/config.json: the architecture 'T5ForConditionalGeneration' is not supported. It is an encoder "
        "with a decoder that attends to it; of such models only Whisper is supported. The page "
        "docs/reference/models.md lists all that are.",
    ),
    Mistake(
        "pull demos",
        "The model 'demos' was not found: '{cwd}/demos' does not exist, and the hub was not asked. Did you mean "
        "'demo', the packaged one?",
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_broken_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_on_the_command_line_says_cause_and_remedy_before_a_worker_starts(
    mistake: Mistake, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_mistake(mistake, models, monkeypatch, capsys)
