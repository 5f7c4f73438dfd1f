"""Counts tokens for the `usage` object of OpenAI API responses."""

from __future__ import annotations

from typing import Any

from mvllm.engine.frontend.outputs import CompletionOutput, RequestOutput


class UsageCounter:
    """Counts the tokens of one HTTP request, over all of its prompts and sequences.

    Args:
        count_completion: False to report 0 completion tokens, for a response that contains only the prompt.

    Attributes:
        num_prompt_tokens: Tokens of the prompts.
        num_cached_tokens: Those of them that were in the prefix cache.
        num_completion_tokens: Generated tokens.
        num_reasoning: Completion tokens that belong to the reasoning; None if reasoning is not separated.
    """

    def __init__(self, *, count_completion: bool = True) -> None:
        self.num_reasoning: int | None = None
        self._count_completion = count_completion
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0
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
            self.num_prompt_tokens += len(output.prompt_token_ids)
            self.num_cached_tokens += output.num_cached_tokens

    def add_completion(self, sequence: CompletionOutput) -> None:
        """Counts the new tokens of a sequence."""
        self.num_completion_tokens += len(sequence.token_ids)

    def to_usage(self, num_unsent: int = 0) -> dict[str, Any]:
        """The `usage` object of the completions and chat completions APIs.

        Args:
            num_unsent: Completion tokens that have been counted, but not sent yet.
        """
        completion = self.num_completion_tokens - num_unsent if self._count_completion else 0
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.num_reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return usage
