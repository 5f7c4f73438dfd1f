"""Which settings `mvllm bench sweep` compares, and the config file and table that it writes."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mvllm.extension_api import ConfigError
from mvllm.extension_api.cli import DEFAULT_NUM_BATCHED_TOKENS, EngineArgs, Option, human_readable_int
from mvllm_bench.sweep import Candidate, SweepResult
from mvllm_bench.sweep_trial import split_settings

API_SERVERS = "api_server_count"
"""A setting of the server that can be varied, besides those of the engine."""

_NUM_SEQS = (64, 128, 256, 512)
_NUM_BATCHED_TOKENS = (1024, 2048, 4096, 8192)
_NOT_VARIED = {"model", "hf_token", "seed", "skip_tokenizer_init", "platform", "tokenizer"}
_NOT_IN_THE_FILE = {"hf_token", "seed", "use_tqdm_on_load"}


def default_axes(most_requests: int) -> dict[str, list[Any]]:
    """Values to compare if none are given.

    Args:
        most_requests: Requests that can run at once; a larger max_num_seqs than the next one above makes no difference.
    """
    above = next((value for value in _NUM_SEQS if value >= most_requests), _NUM_SEQS[-1])
    return {
        "max_num_seqs": [value for value in _NUM_SEQS if value <= above],
        "max_num_batched_tokens": list(_NUM_BATCHED_TOKENS),
    }


def read_axes(given: Iterable[str], *, server: bool) -> dict[str, list[Any]]:
    """The values of `--vary NAME=VALUE,VALUE`, by setting.

    Args:
        server: Whether a server is measured, so that its settings can be varied.

    Raises:
        ConfigError: A setting does not exist, or a value is not permitted.
    """
    options = {name: option for option in EngineArgs.options() for name in (option.name, *option.aliases)}
    axes: dict[str, list[Any]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError(f"--vary: {text!r} must be NAME=VALUE,VALUE, such as max_num_seqs=64,128.")
        if not name.isupper():
            name = name.replace("-", "_")
        if name == API_SERVERS and not server:
            raise ConfigError(f"--vary: {API_SERVERS} is a setting of a server. Add --measure server.")
        if name == API_SERVERS:
            axes[name] = [_integer(name, value) for value in values.split(",")]
        elif name.isupper():
            axes[name] = values.split(",")
        elif name in options and options[name].name not in _NOT_VARIED:
            axes[options[name].name] = [_value(options[name], value) for value in values.split(",")]
        else:
            known = sorted({*options, API_SERVERS} - _NOT_VARIED)
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {nearest[0]}?" if nearest else "Environment variables have capitals."
            raise ConfigError(f"--vary: {name!r} is not a setting that can be varied. {hint}")
    return axes


def candidates(axes: Mapping[str, Sequence[Any]], settings: EngineArgs) -> list[Candidate]:
    """Every combination of the values, without those that are not permitted, or are what `settings` has.

    Raises:
        ConfigError: None is left.
    """
    given = {API_SERVERS: 1, **{field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}}
    if given["max_num_batched_tokens"] is None:
        given["max_num_batched_tokens"] = max(DEFAULT_NUM_BATCHED_TOKENS, settings.max_num_seqs)
    found, error = [], None
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        options, environment = split_settings(chosen)
        if not environment and all(given[name] == value for name, value in options.items()):
            continue
        try:
            engine = {name: value for name, value in options.items() if name != API_SERVERS}
            dataclasses.replace(settings, **engine).validate()
        except ConfigError as e:
            error = e
            continue
        found.append(Candidate(tuple(chosen.items())))
    if not found:
        reason = error or "all are the default settings. Name other values with --vary."
        raise ConfigError(f"No combination of the values is left to measure: {reason}")
    return found


def fixed_settings(settings: EngineArgs) -> dict[str, Any]:
    """The settings that differ from the defaults, and the model: what every start and the config file have."""
    found: dict[str, Any] = {"model": settings.model}
    for option in EngineArgs.options():
        value = getattr(settings, option.name)
        if option.name not in ("model", *_NOT_IN_THE_FILE) and value != option.default:
            found[option.name] = value
    return found


def config_file(fixed: Mapping[str, Any], chosen: Candidate, comments: Iterable[str]) -> str:
    """The text of a file for `mvllm serve --config`. Environment variables, which it cannot set, become a comment."""
    import yaml

    options, environment = split_settings(dict(chosen.settings))
    lines = [*comments]
    if environment:
        variables = " ".join(f"{name}={value}" for name, value in environment.items())
        lines.append(f"Start the server with: {variables} mvllm serve --config FILE")
    options = {name: value for name, value in options.items() if value is not None}
    head = "".join(f"# {line}\n" for line in lines)
    return head + yaml.safe_dump({**fixed, **options}, sort_keys=False)


def format_result(result: SweepResult, unit: str) -> str:
    """The results as a text table: the defaults, then the others in the order in which they were dropped, last first.

    Args:
        unit: What a score is, for the head of the table.
    """
    titles = next((list(each.reported[0].metrics) for each in result.measured if each.reported), [])
    rows = [("settings", unit, "+-", *titles, "rounds")]
    for each in sorted((result.default, *result.measured), key=lambda each: each.error is not None):
        if each.error is not None:
            rows.append((each.candidate.name, f"failed: {each.error[:100]}", "", *("" for _ in titles), ""))
            continue
        error = result.error_of(each)
        means = [statistics.fmean(r.metrics.get(title, 0.0) for r in each.reported) for title in titles]
        rows.append(
            (
                each.candidate.name,
                f"{each.score:,.1f}",
                "?" if error is None else f"{2 * error:,.1f}",
                *(f"{mean:,.1f}" for mean in means),
                str(len(each.reported)),
            )
        )
    fitting = [row for row in rows if not row[1].startswith("failed")]
    widths = [max(len(row[i]) for row in (rows if i == 0 else fitting)) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def summary(result: SweepResult) -> str:
    """What the sweep has found, in a sentence or two."""
    if result.noise is None:
        noise = "The noise is unknown"
    else:
        noise = f"A round varies by {100 * result.noise:.1f} % (standard deviation)"
    if result.best is None:
        return "No candidate works; the default settings are kept."
    if not result.is_faster:
        return f"{noise}: no settings are faster than the default settings beyond that. These are kept."
    if not result.default.score:
        reason = "do not work" if result.default.error else "have no request within the limits"
        return f"{noise}. Fastest: {result.best.candidate.name}. The default settings {reason}."
    gain = f"{100 * (result.gain or 0):.0f} % faster than the default settings"
    return f"{noise}. Fastest: {result.best.candidate.name}, {gain}."


def _integer(name: str, text: str) -> int:
    try:
        number = human_readable_int(text)
    except argparse.ArgumentTypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"--vary: {name} must be an integer of at least 1, found {text!r}.")
    return number


def _value(option: Option, text: str) -> Any:
    """A value of a setting, from its text.

    Raises:
        ConfigError: It is not permitted.
    """
    if text.lower() in ("none", "null") and option.nullable:
        return None
    if text in option.words:
        return text
    value: Any = text
    try:
        if option.kind is int:
            value = human_readable_int(text)
        elif option.kind is float:
            value = float(text)
        elif option.kind is bool:
            value = {"true": True, "on": True, "false": False, "off": False}[text.lower()]
    except (ValueError, KeyError, argparse.ArgumentTypeError):
        pass  # `checked` reports it
    return option.checked(value)
