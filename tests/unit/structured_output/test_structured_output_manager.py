"""StructuredOutputManager: a killed sandbox, many choices, boolean schemas."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mvllm import SamplingParams, StructuredOutputsParams
from mvllm.config.engine_args import EngineArgs
from mvllm.demo import demo_model_path
from mvllm.engine.core.grammars import load_vocabulary
from mvllm.engine.tokenizer.tokenizer import load_tokenizer
from mvllm.executor.process import pipe_process
from mvllm.messages.requests import EngineCoreRequest
from mvllm.messages.structured_outputs import MAX_CHOICES
from mvllm.structured_output.structured_output_manager import GrammarResult, StructuredOutputManager

KILLS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def manager() -> Iterator[StructuredOutputManager]:
    config = EngineArgs(model=str(demo_model_path())).create_engine_config()
    manager = StructuredOutputManager(lambda: load_vocabulary(config.model))
    yield manager
    manager.shutdown()


def make_request(**form: Any) -> EngineCoreRequest:
    settings = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    return EngineCoreRequest(request_id="a", prompt_token_ids=[5], sampling_params=settings, eos_token_ids=[1])


def outcome_of(manager: StructuredOutputManager, request: EngineCoreRequest) -> GrammarResult:
    manager.submit(request)
    deadline = time.monotonic() + 240
    while not (found := manager.pop_results()):
        assert time.monotonic() < deadline
        manager.wait(0.1)
    return found[0]


def test_a_grammar_is_compiled_again_after_its_sandbox_was_killed(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(regex="ab")
    with monkeypatch.context() as patch:
        command = [sys.executable, "-c", KILLS_ITSELF]
        patch.setattr(
            pipe_process,
            "start_pipe_process",
            lambda _: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE),
        )
        error = outcome_of(manager, request).error
        assert error is not None and "killed" in error
    assert outcome_of(manager, request).error is None


def test_the_maximum_number_of_choices_can_be_generated(manager: StructuredOutputManager) -> None:
    choices = [f"choice {i} of it" for i in range(MAX_CHOICES)]
    config = EngineArgs(model=str(demo_model_path())).create_engine_config()
    tokenizer = load_tokenizer(config.model)
    assert tokenizer is not None
    request = make_request(choice=choices)
    for text in (choices[0], choices[-1]):
        grammar = outcome_of(manager, request).grammar
        assert grammar is not None
        for token in tokenizer.encode(text, add_special_tokens=False):
            assert grammar.mask[token >> 3] >> (token & 7) & 1
            grammar.accept(token)
            assert grammar.error is None


def test_a_schema_may_be_true(manager: StructuredOutputManager) -> None:
    for schema in ("true", True):
        assert outcome_of(manager, make_request(json=schema)).error is None
