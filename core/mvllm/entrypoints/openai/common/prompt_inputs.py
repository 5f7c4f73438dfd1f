"""Prompts of requests for completions and pooling: texts or token ids, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType

PromptField = str | list[str | int | list[int]] | None
"""A text, a list of texts, token ids, or a list of lists of token ids."""


def split_prompts(value: PromptField, field: str) -> Sequence[str | list[int]]:
    """The prompts in a field of a request. A list of numbers is one prompt.

    Raises:
        RequestError: The field is missing or empty, or its entries are of several kinds.
    """
    if value is None:
        raise RequestError(f"{field} is missing.", parameter=field)
    if isinstance(value, str):
        return [value]
    if not value:
        raise RequestError(f"{field} is an empty list.", parameter=field)
    kinds = set(map(type, value))
    if kinds == {int}:
        return [cast("list[int]", value)]
    if kinds in ({str}, {list}):
        return cast("list[str | list[int]]", value)
    raise RequestError(
        f"{field} must be a text, a list of texts, a list of token ids or a list of those; its entries are of several "
        "kinds.",
        parameter=field,
    )


async def build_prompts(
    tokenizer_pool: TokenizerPool,
    prompts: Sequence[str | list[int]],
    *,
    add_special_tokens: bool | None,
    cache_salt: str | None,
    truncated: bool = False,
) -> list[PromptType]:
    """Prompts as the engine takes them. Texts are tokenized here only where they get no special tokens.

    Args:
        truncated: Only the last tokens of each prompt are used, so its length is not checked.

    Raises:
        RequestError: A text cannot be tokenized, or is too long for the model.
    """
    salt = {} if cache_salt is None else {"cache_salt": cache_salt}
    built: list[dict[str, object]] = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            built.append({"prompt_token_ids": prompt, **salt})
        elif add_special_tokens is False:
            ids = await tokenizer_pool.encode(prompt, add_special_tokens=False, truncated=truncated)
            built.append({"prompt_token_ids": ids, "prompt": prompt, **salt})
        else:
            built.append({"prompt": prompt, **salt})
    return cast("list[PromptType]", built)
