"""How many tokens an answer took."""

from __future__ import annotations

from typing import Any

from mvllm.engine.frontend.outputs import RequestOutput


class UsageCounter:
    """Adds up the tokens of one HTTP request, over prompts and sequences, piece by piece or at once."""

    def __init__(self) -> None:
        self._prompt = 0
        self._cached = 0
        self._completion = 0
        self._seen: set[int] = set()

    def add(self, position: int, output: RequestOutput) -> None:
        """Counts a prompt once, and the tokens of each piece.

        Args:
            position: Which of several prompts the output is about.
        """
        if position not in self._seen:
            self._seen.add(position)
            self._prompt += len(output.prompt_token_ids)
            self._cached += output.num_cached_tokens
        for sequence in output.outputs:
            self._completion += len(sequence.token_ids)

    def to_usage(self, *, without_completion: bool = False) -> dict[str, Any]:
        """The `usage` object.

        Args:
            without_completion: The one token that was generated is no part of the answer.
        """
        completion = 0 if without_completion else self._completion
        return {
            "prompt_tokens": self._prompt,
            "total_tokens": self._prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

    def to_response_usage(self, num_reasoning_tokens: int) -> dict[str, Any]:
        """The `usage` object of the Responses API.

        Args:
            num_reasoning_tokens: How many of the tokens wrote thoughts.
        """
        return {
            "input_tokens": self._prompt,
            "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": self._completion,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": self._prompt + self._completion,
        }
