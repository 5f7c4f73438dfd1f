"""The tags of a model's thoughts for requests that limit them and name none: those of the format that its chat template
shows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from mvllm.config.model import ModelConfig
from mvllm.entrypoints.chat_template import read_chat_template
from mvllm.entrypoints.parsers.parser_rules import find_reasoning_rule
from mvllm.entrypoints.parsers.registry import reasoning_parser, reasoning_parser_names
from mvllm.messages.sampling_params import SamplingParams


def with_thinking_tags(params: SamplingParams, model: ModelConfig) -> SamplingParams:
    """`params`, or a copy with `thinking_tags` if there is a budget without them and the template shows the format."""
    if params.thinking_token_budget is None or params.thinking_tags or params.thinking_tokens or not model.tokenizer:
        return params
    template = read_chat_template(Path(model.tokenizer))
    rule = find_reasoning_rule(template) if template else None
    if rule is None or rule.parser not in reasoning_parser_names():
        return params
    return msgspec.structs.replace(params, thinking_tags=reasoning_parser(rule.parser).budget_tags())
