"""A body with more nesting than can be processed is a client error, wherever the depth is detected."""

from __future__ import annotations

from mvllm.entrypoints.openai.common.errors import to_api_error


def test_a_value_too_deep_to_be_encoded_is_a_400() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    try:
        repr(deep)
    except RecursionError as e:
        error = to_api_error(e)
    assert (error.status, str(error)) == (400, "The body is nested too deeply.")
