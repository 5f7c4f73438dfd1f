"""Counts tokens for the `usage` object of OpenAI API responses."""

from __future__ import annotations

from typing import Any

from mvllm.engine.frontend.outputs import CompletionOutput, RequestOutput


class UsageCounter:
    """Counts the tokens of one HTTP request, over all of its prompts and sequences.

    Args:
        count_completion: False to report 0 completion tokens, for a response that contains only the prompt.

    Attributes:
        num_reasoning: Completion tokens that belong to the reasoning; None if reasoning is not separated.
    """

    def __init__(self, *, count_completion: bool = True) -> None:
        self.num_reasoning: int | None = None
        self._count_completion = count_completion
        self._prompt = 0
        self._cached = 0
        self._completion = 0
        self._seen: set[int] = set()

    def add(self, position: int, output: RequestOutput) -> None:
        """Counts the prompt, once, and the new tokens of an output.

        Args:
            position: Index of the output's prompt in the request.
        """
        self.add_prompt(position, output)
        for sequence in output.outputs:
            self.add_completion(sequence)

    def add_prompt(self, position: int, output: RequestOutput) -> None:
        """Counts the prompt of an output, once."""
        if position not in self._seen:
            self._seen.add(position)
            self._prompt += len(output.prompt_token_ids)
            self._cached += output.num_cached_tokens

    def add_completion(self, sequence: CompletionOutput) -> None:
        """Counts the new tokens of a sequence."""
        self._completion += len(sequence.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts."""
        return self._prompt

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that were in the prefix cache."""
        return self._cached

    @property
    def num_completion_tokens(self) -> int:
        """Generated tokens."""
        return self._completion

    def to_usage(self, num_unsent: int = 0) -> dict[str, Any]:
        """The `usage` object of the completions and chat completions APIs.

        Args:
            num_unsent: Completion tokens that have been counted, but not sent yet.
        """
        completion = self._completion - num_unsent if self._count_completion else 0
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt,
            "total_tokens": self._prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }
        if self.num_reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return usage
