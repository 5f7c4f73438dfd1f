"""Spellings of options that other engines' command lines have, rewritten to those that argparse knows.

--max_model_len 64                    --max-model-len 64
-tp 2, -O2                            --tensor-parallel-size 2, --optimization-level 2
--hf-overrides.rope_theta 1e6         --hf-overrides '{"rope_theta": 1000000.0}'
--compilation-config.sizes+ 1,2       --compilation-config '{"sizes": [1, 2]}'
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mvllm.config.human_readable_int import human_readable_int
from mvllm.config.option_arguments import add_named_option, json_object, json_object_or_pairs, json_or_text
from mvllm.errors import ConfigError

SHORT_OPTIONS = {
    "-q": "--quantization",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-asc": "--api-server-count",
    "-sc": "--speculative-config",
    "-dc": "--diffusion-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-O": "--optimization-level",
}
"""vLLM's short options. A command that has the long one accepts them."""

_LEVEL = re.compile(r"-O=?(\w+)")
_TAKES_JSON = (json_object, json_object_or_pairs, json_or_text)
ENGINE_OPTION = "--tensor-parallel-size"
"""Commands with this option have the engine's settings."""


def as_declared(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments of a command with its options as argparse knows them. What follows `--` stays.

    Options of other engines whose names are known by a pattern are added to the parser.

    Raises:
        ConfigError: An option with a dot has no value.
    """
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    found: list[str] = []
    entries: dict[str, dict[str, Any]] = {}
    rest = iter(arguments[:end])
    for argument in rest:
        name, equals, value = argument.partition("=")
        option, _, path = name.partition(".")
        declared = None if _is_text(argument, name, value) else _declared(parser, option)
        if declared is None:
            found += _optimization_level(parser, argument)
        elif not path:
            found.append(f"{declared}{equals}{value}")
        elif not _takes_json(parser, declared):
            found.append(argument)  # argparse reports it
        else:
            text = value if equals else next(rest, None)
            if text is None:
                raise ConfigError(f"{name} needs a value.")
            _store(entries.setdefault(declared, {}), path, text)
    for declared, entry in entries.items():
        found = [*_without_objects(found, declared, entry), f"{declared}={json.dumps(entry)}"]
    return [*found, *arguments[end:]]


def _is_text(argument: str, name: str, value: str) -> bool:
    """Whether an argument is no option but a value, perhaps one that begins with a dash: `-n=5 is what?`.

    As for argparse, which knows no short options with spaces in them; here JSON may have some.
    """
    is_short = not argument.startswith("--")
    return not argument.startswith("-") or " " in name or (is_short and " " in value and value[0] not in "{[")


def _declared(parser: argparse.ArgumentParser, option: str) -> str | None:
    """The name that the parser has for an option; None if it has none."""
    known = parser._option_string_actions
    if option in known:
        return option
    if not option.startswith("--"):
        long = SHORT_OPTIONS.get(option)
        return long if long in known and f"-{option}" not in known else None  # -n is not clear beside --n
    words = option[2:]
    for spelling in (words.replace("_", "-"), words.replace("-", "_")):
        if f"--{spelling}" in known:
            return f"--{spelling}"
    if ENGINE_OPTION in known and add_named_option(parser, words.replace("-", "_").removeprefix("no_")):
        return f"--{words.replace('_', '-')}"
    return None


def _takes_json(parser: argparse.ArgumentParser, declared: str) -> bool:
    return parser._option_string_actions[declared].type in _TAKES_JSON


def _optimization_level(parser: argparse.ArgumentParser, argument: str) -> list[str]:
    match = _LEVEL.fullmatch(argument)
    long = SHORT_OPTIONS["-O"]
    return [f"{long}={match[1]}"] if match and long in parser._option_string_actions else [argument]


def _store(entry: dict[str, Any], path: str, text: str) -> None:
    """Stores one value under its path, as JSON, a number with a unit, or a text; `+` appends a list."""
    *parents, last = path.split(".")
    for parent in parents:
        child = entry.setdefault(parent, {})
        entry = child if isinstance(child, dict) else entry.setdefault(parent, {})
    if last.endswith("+"):
        found = entry.setdefault(last[:-1], [])
        if isinstance(found, list):
            found += [_value(each) for each in text.split(",")]
    else:
        entry[last] = _value(text)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        try:
            return human_readable_int(text)
        except (ValueError, argparse.ArgumentTypeError):
            return text


def _without_objects(arguments: list[str], declared: str, entry: dict[str, Any]) -> list[str]:
    """The arguments without the option's JSON objects, whose other entries are added to `entry`."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name != declared:
            kept.append(argument)
            continue
        _add_missing(entry, json_object_or_pairs(value if equals else next(rest, "")))
    return kept


def _add_missing(entry: dict[str, Any], given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        present = entry.setdefault(key, value)
        if isinstance(present, dict) and isinstance(value, dict) and present is not value:
            _add_missing(present, value)
