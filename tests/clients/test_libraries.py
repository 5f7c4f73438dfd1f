"""Libraries that people reach models with work against a running server as they are."""

from __future__ import annotations

from tests.clients.conftest import RunProgram

ANSWER = "The capital of Italy is Rome."


def test_openai(run_program: RunProgram) -> None:
    assert run_program("openai") == {
        "answer": ANSWER,
        "models": ["demo"],
        "stream": [ANSWER, True],
        "usage, streamed": True,
        "parse": "City",
        "calls": [["City", "tool_calls"], ["City", "stop"]],
        "call, streamed": True,
        "after the call": "assistant",
        "completions": [" Paris."] * 2,
        "embeddings": [True, True],
        "responses": [ANSWER, "completed"],
        "async": [ANSWER, "City", ANSWER],
        "retries": [1, True],
        "errors": [
            ["AuthenticationError", "AuthenticationError"],
            ["NotFoundError", "NotFoundError"],
            ["BadRequestError", "BadRequestError"],
        ],
    }


def test_openai_of_npm(run_program: RunProgram) -> None:
    assert run_program("openai_npm") == {
        "answer": [ANSWER, "stop"],
        "models": ["demo"],
        "stream": [ANSWER, True],
        "stream helper": ANSWER,
        "form": ["on", "x"],
        "call": ["point", ["on", "x"], "tool_calls"],
        "call, streamed": True,
        "after the call": "assistant",
        "tool runner": "point",
        "embeddings": [True, True],
        "response": ANSWER,
        "abort": "ended",
        "retries": [300, 300],
        "errors": [
            ["AuthenticationError", 401, "AuthenticationError"],
            ["NotFoundError", 404, "NotFoundError"],
            ["BadRequestError", 400, "BadRequestError"],
        ],
    }


def test_pydantic_ai(run_program: RunProgram) -> None:
    assert run_program("pydantic_ai") == {
        "openai": [ANSWER, ANSWER, True, 4, "City"],
        "anthropic": [ANSWER, ANSWER, True, 4, "City"],
        "native": "City",
        "errors": [401, 401, 404, 404],
    }


def test_instructor(run_program: RunProgram) -> None:
    assert run_program("instructor") == {
        "TOOLS": ["City", True],
        "JSON_SCHEMA": ["City", True],
        "TOOLS_STRICT": ["City", True],
        "partial": [True, True],
        "error": True,
    }


def test_huggingface_hub(run_program: RunProgram) -> None:
    assert run_program("huggingface_hub", HF_HUB_OFFLINE="0") == {
        "chat": [ANSWER, True],
        "same": ANSWER,
        "stream": [ANSWER, True],
        "call": ["point", ["on", "x"]],
        "form": ["on", "x"],
        "logprobs": [2, 2, 2],
        "async": [ANSWER] * 4,
        "errors": [401, 404, 400],
    }


def test_litellm(run_program: RunProgram) -> None:
    found = run_program("litellm")
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
    found = run_program("langchain")
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
    assert run_program("anthropic") == {
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
    assert run_program("ollama") == {
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
