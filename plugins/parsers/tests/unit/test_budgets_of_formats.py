"""Thinking budgets of every format with tags: they count exactly the tokens that the reasoning parser finds."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest
from plugins.parsers.tests.unit.test_reasoning_formats import ALL, parse, reasoning_parser
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from mvllm.engine.frontend.thinking_tags import fit_thinking_to_prompt, thinking_tokens_of
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.entrypoints.parsers.tagged_reasoning import TaggedReasoningParser, ends_with_tag
from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.thinking import ThinkingTokens
from mvllm.sampling.forced_tokens import ThinkingBudgets
from tests.unit.engine.tokenizers import make_hf_tokenizer

ALWAYS_REASON = ["deepseek_r1", "ernie45", "kimi_k2", "minimax_m2", "nemotron_v3", "olmo3"]
END_WITH_A_CALL = ["gemma4", "glm45", "glm47", "kimi_k2", "minimax_m2", "nemotron_v3", "qwen3"]
SPECIAL = ["<think>", "</think>", "<|tool_calls_section_begin|>", "<tool_call>", "<minimax:tool_call>", "[THINK]"]
SPECIAL += ["[/THINK]", "<|channel>", "<channel|>", "<|tool_call>", "<seed:think>", "</seed:think>"]


def has_the_tags(name: str, prompt: str | None, text: str) -> bool:
    """Whether the thoughts of a case are those of the format's first pair of tags."""
    parser = reasoning_parser(name)
    if not issubclass(parser, TaggedReasoningParser):
        return False
    starts = [parser.tags[0], *(start for start, _ in parser.more_tags)]
    found = next((start for start in starts if text.lstrip().startswith(start)), None)
    return found in (None, parser.tags[0])


CASES = [case for case in ALL if has_the_tags(*case[:3])]


@cache
def tokenizer(are_special: bool) -> Tokenizer:
    def load() -> PreTrainedTokenizerBase:
        plain = make_hf_tokenizer("byte_level")
        if are_special:
            plain.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
        return plain

    return Tokenizer(load)


def encode(text: str, are_special: bool) -> list[int]:
    return tokenizer(are_special).encode(text, add_special_tokens=False)


def fitted(name: str, prompt: str, budget: int, are_special: bool) -> ThinkingTokens | None:
    """The tokens that a request with a budget has in the engine; None if its prompt closes the thoughts."""
    tags = reasoning_parser(name).budget_tags()
    assert tags is not None
    tokens = thinking_tokens_of(tags, tokenizer(are_special))
    params = SamplingParams(thinking_token_budget=budget, thinking_tags=tags)
    params = msgspec.structs.replace(params, thinking_tokens=tokens)
    params = fit_thinking_to_prompt(params, prompt, encode(prompt, are_special), tokenizer(are_special))
    return params.thinking_tokens if params.thinking_token_budget is not None else None


def first_forced(tokens: ThinkingTokens, budget: int, ids: list[int]) -> tuple[int, list[int]] | None:
    """Behind how many tokens of an output others are forced, and these; None if none are."""
    budgets, history = ThinkingBudgets(1), np.array([ids + [0] * 40])
    budgets.set_row(0, budget, tokens, 0)
    for length in range(len(ids)):
        forced: list[int] = []
        while (found := _forced(budgets, history, length + len(forced))) is not None:
            history[0, length + len(forced)] = found
            forced.append(found)
        if forced:
            return length, forced
    return None


def _forced(budgets: ThinkingBudgets, history: np.ndarray, length: int) -> int | None:
    found = budgets.forced_tokens(np.array([0]), np.array([length]), history, np.array([length]))
    return None if found is None else int(found[0])


@pytest.mark.parametrize("are_special", [True, False], ids=["special tokens", "text"])
@pytest.mark.parametrize(("name", "prompt", "text"), [case[:3] for case in CASES])
def test_a_budget_counts_the_tokens_that_the_parser_finds(
    name: str, prompt: str | None, text: str, are_special: bool
) -> None:
    ids = encode(text, are_special)
    decode = tokenizer(are_special).decode
    lengths = range(len(ids))
    texts = [decode(ids[:length], skip_special_tokens=False) for length in lengths]
    streams = [reasoning_parser(name)().stream(prompt) for _ in lengths]
    for stream, beginning in zip(streams, texts, strict=True):
        stream.feed(beginning)
    num_thoughts = sum(stream.in_reasoning for stream in streams)
    for budget in range(len(ids) + 1):
        tokens = fitted(name, prompt or "", budget, are_special)
        found = None if tokens is None else first_forced(tokens, budget, ids)
        if found is None:  # the beginning of a call has one token less here: its last character may be in another one
            assert num_thoughts <= budget + 1
            continue
        length, forced = found
        assert num_thoughts > budget and streams[length].in_reasoning
        answer = texts[length] + decode(forced, skip_special_tokens=False) + "Four."
        thoughts, content = parse(name, [answer], prompt)
        assert content == "Four." and (thoughts or "") in text


@pytest.mark.parametrize("name", ALWAYS_REASON)
def test_formats_that_always_reason_have_a_budget_from_the_first_token(name: str) -> None:
    for prompt in ("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>", "<|im_start|>assistant\n<think>\n"):
        tokens = fitted(name, prompt, 2, True)
        assert tokens is not None and not tokens.starts
        assert first_forced(tokens, 2, encode("I add one and two.", True)) == (2, encode("</think>", True))
    for prompt in ("assistant<think></think>", "assistant\n<think>\n\n</think>\n\n", "assistant</think>"):
        assert fitted(name, prompt, 2, True) is None


def test_the_formats_are_those_of_the_parsers() -> None:
    tagged = {name: reasoning_parser(name) for name, *_ in ALL}
    tagged = {name: parser for name, parser in tagged.items() if issubclass(parser, TaggedReasoningParser)}
    assert sorted(name for name, parser in tagged.items() if parser.always_reasons) == ALWAYS_REASON
    assert sorted(name for name, parser in tagged.items() if parser.implicit_ends) == END_WITH_A_CALL
    for name, parser in tagged.items():
        assert parser.budget_tags()[0] == ("" if name in ALWAYS_REASON else parser.tags[0])
    assert ends_with_tag("a <think>\n", "<think>")


@pytest.mark.parametrize("function", ["get_weather", "f", "1st", "_x", "Read"])
def test_a_call_is_found_whatever_the_name_of_its_function(function: str) -> None:
    call = f"<tool_call>\n<function={function}>\n</function>\n</tool_call>"
    for name in ("nemotron_v3", "qwen3"):
        tokens = fitted(name, "assistant\n<think>\n", 30, True)
        assert tokens is not None
        ids = encode("I call." + call + " I add one and two and three and four.", True)
        assert len(ids) > 40 and first_forced(tokens, 30, ids) is None
