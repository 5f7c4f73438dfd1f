"""Libraries that people reach models with work against a running server as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ANSWER = "The capital of Italy is Rome."
RunProgram = Callable[[str], dict[str, Any]]


def test_openai(run_program: RunProgram) -> None:
    assert run_program("openai_program") == {
        "answer": ANSWER,
        "models": ["demo"],
        "stream": [ANSWER, True],
        "parse": "City",
        "calls": [["City", "tool_calls"], ["City", "stop"]],
        "call, streamed": True,
        "after the call": "assistant",
        "async": [ANSWER, "City", ANSWER],
        "errors": [
            ["AuthenticationError", "AuthenticationError"],
            ["NotFoundError", "NotFoundError"],
            ["BadRequestError", "BadRequestError"],
        ],
    }


def test_litellm(run_program: RunProgram) -> None:
    found = run_program("litellm_program")
    for provider in ("openai", "hosted_vllm"):
        text, reason, num_tokens = found.pop(provider)
        assert (text, reason) == (ANSWER, "stop") and num_tokens > 10
        assert found.pop(f"{provider}, streamed") == ANSWER
    assert found == {
        "call": ["point", ["on", "x"], "tool_calls"],
        "form": ["on", "x"],
        "text": " Paris.",
        "at once": [ANSWER] * 8,
        "errors": ["BadRequestError", "NotFoundError", "AuthenticationError"],
    }


def test_langchain(run_program: RunProgram) -> None:
    found = run_program("langchain_program")
    text, num_tokens, reason = found.pop("invoke")
    assert (text, reason) == (ANSWER, "stop") and found.pop("usage") == num_tokens > 3
    assert found == {
        "stream": [ANSWER, True],
        "batch": [ANSWER] * 4,
        "async": [ANSWER, ANSWER],
        "json_schema": "City",
        "function_calling": "City",
        "call": ["weather", ["city"], True],
        "call, streamed": [["weather", True]],
        "after the call": True,
        "logprobs": [2, 2, 2],
        "completion": " Paris.",
        "error": True,
    }


def test_anthropic(run_program: RunProgram) -> None:
    assert run_program("anthropic_program") == {
        "answer": [ANSWER, "end_turn", True],
        "count": True,
        "stop": "Italy",
        "cut": "max_tokens",
        "stream": [ANSWER, ANSWER, "end_turn", True],
        "call": ["point", ["on", "x"], "tool_use"],
        "call, streamed": True,
        "after the call": "assistant",
        "beta": ANSWER,
        "models": [["demo", "model"]],
        "model": "demo",
        "async": [ANSWER] * 4,
        "errors": [
            ["BadRequestError", "invalid_request_error", True],
            ["NotFoundError", "not_found_error", True],
            ["AuthenticationError", "authentication_error", True],
        ],
    }


def test_ollama(run_program: RunProgram) -> None:
    assert run_program("ollama_program") == {
        "chat": [ANSWER, "stop", True, True],
        "stream": [ANSWER, True, True],
        "raw": [" Paris.", "length"],
        "generate": ANSWER,
        "generate, streamed": ANSWER,
        "form": ["on"],
        "after the call": ["assistant", "assistant"],
        "loaded": "load",
        "models": ["demo:latest"],
        "running": ["demo:latest"],
        "show": ["completion", "tools"],
        "embed": [True, True],
        "async": [ANSWER] * 4,
        "errors": [[400, True], [404, True], [401, True]],
    }
