"""A refusal that is not the grammar's fault is not kept."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from mvllm import SamplingParams, StructuredOutputsParams
from mvllm.config.engine_args import EngineArgs
from mvllm.demo import demo_model_path
from mvllm.engine.grammar_vocabulary import load_vocabulary
from mvllm.messages.requests import EngineCoreRequest
from mvllm.structured_output import trial_process
from mvllm.structured_output.manager import GrammarManager, GrammarOutcome

KILLS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def outcome_of(manager: GrammarManager, request: EngineCoreRequest) -> GrammarOutcome:
    manager.submit(request)
    deadline = time.monotonic() + 240
    while not (found := manager.collect()):
        assert time.monotonic() < deadline
        manager.wait(0.1)
    return found[0]


def test_after_a_trial_was_killed_the_same_wish_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineArgs(model=str(demo_model_path())).create_engine_config()
    manager = GrammarManager(lambda: load_vocabulary(config.model))
    settings = SamplingParams(structured_outputs=StructuredOutputsParams(regex="ab"))
    request = EngineCoreRequest(request_id="a", prompt_token_ids=[5], sampling_params=settings, eos_token_ids=[1])
    try:
        with monkeypatch.context() as patch:
            patch.setattr(
                trial_process,
                "_launch",
                lambda: subprocess.Popen(
                    [sys.executable, "-c", KILLS_ITSELF], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                ),
            )
            error = outcome_of(manager, request).error
            assert error is not None and "killed" in error and "try again" in error
        assert outcome_of(manager, request).error is None
    finally:
        manager.shutdown()
