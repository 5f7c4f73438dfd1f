"""Makes the grammar of a structural tag: free text up to a trigger, then the structure of that trigger, repeated.

A structure is a beginning, arguments that follow a schema, and an end. The arguments are JSON, or in one of the styles
of tool call formats: text between XML-like tags, Python's keyword arguments with JSON values, or JSON after the number
of the call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FREE = "FREE: /(?s:.*)/"
NUMBERED, PYTHON = "numbered_json", "python"


@dataclass(frozen=True)
class TagStyle:
    """The tags around one argument.

    Attributes:
        opening: Text before the value; `{key}` is the argument's name, and `{string}` whether it is a string.
        closing: Text after it.
        gap: Text after each argument.
    """

    opening: str
    closing: str
    gap: str = "\n"


STYLES = {
    "qwen_xml": TagStyle("<parameter={key}>\n", "\n</parameter>"),
    "glm_xml": TagStyle("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>"),
    "glm_compact_xml": TagStyle("<arg_key>{key}</arg_key><arg_value>", "</arg_value>", ""),
    "minimax_xml": TagStyle('<parameter name="{key}">', "</parameter>"),
    "deepseek_xml": TagStyle('<｜DSML｜parameter name="{key}" string="{string}">', "</｜DSML｜parameter>"),
}
"""Styles of arguments, by name."""


def structural_tags(tokenizer: Any, described: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """The grammar in the library's form.

    Args:
        tokenizer: The library's tokenizer.
        described: The structural tag.
        options: Options of JSON schemas.
    """
    tags = described["structures"]
    # The longest first: a shorter trigger could be its prefix.
    triggers = sorted(described["triggers"], key=len, reverse=True)
    texts = (as_terminal(tokenizer, each) for each in described.get("special_tokens", ()))
    special = [terminal for terminal in texts if terminal.startswith("<")]
    any_text = f"(FREE ({' | '.join(special)}))* " if special else ""
    rules = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(tags)))})* {any_text}FREE", FREE]
    for i, tag in enumerate(tags):
        trigger = next(trigger for trigger in triggers if tag["begin"].startswith(trigger))
        begin = sequence(tokenizer, tag["begin"][len(trigger) :])
        end = sequence(tokenizer, tag["end"])
        rules += [
            _up_to(tokenizer, f"head_{i}", trigger),
            f"tag_{i}: {any_text}head_{i} {begin} body_{i} {end}",
            *_body(tokenizer, i, tag, options),
        ]
    return "\n".join(rules)


def as_terminal(tokenizer: Any, text: str) -> str:
    """The terminal of a text: a token, if the text is one special token, else the text."""
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return f"<[{ids[0]}]>" if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else json.dumps(text)


def sequence(tokenizer: Any, text: str) -> str:
    """The terminals of a text that may contain special tokens; empty for an empty text."""
    ids = tokenizer.tokenize_str(text, parse_special=True) if text else []
    if not any(map(tokenizer.is_special_token, ids)):
        return json.dumps(text) if text else ""
    parts: list[str] = []
    run: list[int] = []
    for token in ids:
        if tokenizer.is_special_token(token):
            parts += [json.dumps(tokenizer.decode_str(run))] if run else []
            parts.append(f"<[{token}]>")
            run = []
        else:
            run.append(token)
    return " ".join([*parts, json.dumps(tokenizer.decode_str(run))] if run else parts)


def _up_to(tokenizer: Any, name: str, text: str) -> str:
    """A rule of any text up to the first `text`."""
    terminal = as_terminal(tokenizer, text)
    return f"{name}{'' if terminal.startswith('<') else '[lazy]'}: FREE {terminal}"


def _body(tokenizer: Any, i: int, tag: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """The rules of the arguments of structure `i`."""
    schema, style = tag["schema"], tag.get("style", "json")
    if style in STYLES:
        return _tagged_body(tokenizer, i, schema, STYLES[style], options)
    if style == PYTHON:
        return _python_body(i, schema, options)
    value = f"%json {json.dumps({'x-guidance': options, **schema})}"
    if style == NUMBERED:
        separator = sequence(tokenizer, tag.get("separator", ""))
        return [f"body_{i}: /[0-9]{{1,4}}/ {separator} json_{i}", f"json_{i}: {value}"]
    return [f"body_{i}: {value}"]


def _tagged_body(
    tokenizer: Any, i: int, schema: Mapping[str, Any], style: TagStyle, options: Mapping[str, Any]
) -> list[str]:
    """The rules of arguments in tags, in the order of their declaration. Lengths and patterns of strings are free."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required", ())
    names: list[str] = []
    rules: list[str] = []
    for k, (key, inner) in enumerate(schema.get("properties", {}).items()):
        rule = f"argument_{i}_{k}"
        kind = inner.get("type") if isinstance(inner, Mapping) else None
        is_string = kind == "string" or (isinstance(kind, list) and "string" in kind)
        opening = sequence(tokenizer, style.opening.format(key=key, string=str(is_string).lower()))
        gap = sequence(tokenizer, style.gap)
        names.append(rule if key in required else f"{rule}?")
        choices = inner.get("enum") if is_string else None
        if choices and all(isinstance(choice, str) for choice in choices):
            value = f"({' | '.join(map(json.dumps, choices))}) {sequence(tokenizer, style.closing)}"
        elif is_string:
            value = f"value_{i}_{k}"
            rules.append(_up_to(tokenizer, value, style.closing))
        else:
            whole = {"x-guidance": options, **shared, **(inner if isinstance(inner, Mapping) else {})}
            rules.append(f"value_{i}_{k}: %json {json.dumps(whole)}")
            value = f"value_{i}_{k} {sequence(tokenizer, style.closing)}"
        rules.append(f"{rule}: {opening} {value} {gap}")
    return [f"body_{i}: {' '.join(names)}" if names else f'body_{i}: ""', *rules]


def _python_body(i: int, schema: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """The rules of keyword arguments in the order of their declaration, with commas between those that are there."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required", ())
    properties = schema.get("properties", {})
    last = len(properties)
    rules = [f"body_{i}: first_{i}_0", f'first_{i}_{last}: ""', f'later_{i}_{last}: ""']
    for k, (key, inner) in enumerate(properties.items()):
        later = f"later_{i}_{k + 1}"
        whole = {"x-guidance": options, **shared, **(inner if isinstance(inner, Mapping) else {})}
        is_optional = key not in required
        rules += [
            f"value_{i}_{k}: %json {json.dumps(whole)}",
            f"argument_{i}_{k}: {json.dumps(f'{key}=')} value_{i}_{k}",
            f"first_{i}_{k}: argument_{i}_{k} {later}{f' | first_{i}_{k + 1}' if is_optional else ''}",
            f'later_{i}_{k}: ", " argument_{i}_{k} {later}{f" | {later}" if is_optional else ""}',
        ]
    return rules
