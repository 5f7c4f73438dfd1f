"""Command-line options generated from the fields of EngineArgs and SamplingParams."""

from __future__ import annotations

import argparse
import inspect
import re
import types
import typing
from typing import Any

import msgspec

from mvllm.config.engine_args import EngineArgs
from mvllm.config.foreign_keywords import engine_keywords, find_foreign
from mvllm.config.human_readable_int import human_readable_int
from mvllm.config.option import Option
from mvllm.config.option_arguments import add_foreign_options, add_option, option_flags, option_help
from mvllm.entrypoints.cli.argument_parser import ModelAction, add_positional_model
from mvllm.entrypoints.cli.config_file import add_config_argument
from mvllm.errors import ConfigError
from mvllm.messages.sampling_params import SamplingParams

_GROUP_TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduler",
    "parallel": "several devices",
    "load": "loading",
    "multimodal": "multimodal inputs",
    "lora": "LoRA adapters",
    "platform": "platform",
}
# Fields without a use on a terminal, and fields with an option of another form.
_NOT_SAMPLING_OPTIONS = {
    "output_kind",
    "detokenize",
    "flat_logprobs",
    "logprobs",
    "logits_processors",  # the engine's setting has this name
    "prompt_logprobs",
    "seed",
    "skip_reading_prefix_cache",
    "thinking_tokens",
    "token_space",  # a terminal shows text
}
_NOT_ENGINE_OPTIONS = {"skip_tokenizer_init"}
_OPTIONS_OF_COMMANDS = {"chat_template", "otlp_traces_endpoint", "reasoning_parser", "served_model_name"}


def add_engine_arguments(
    parser: argparse.ArgumentParser, *, model_required: bool = True, own_seed: bool = False
) -> None:
    """Adds one option per field of EngineArgs, in groups. The namespace contains only options that are given.

    Args:
        model_required: Report an error if no model is given.
        own_seed: The command defines `--seed` itself; its value is the engine's seed, too.
    """
    add_config_argument(parser)
    parser.set_defaults(own_seed=own_seed)
    add_positional_model(
        parser, "Model folder, GGUF file, name on the Hugging Face hub, or 'demo'; the same as --model."
    )
    if model_required:
        parser.set_defaults(needs_model=True)
    groups: dict[str, Any] = {}
    for setting in EngineArgs.options():
        if setting.name in _NOT_ENGINE_OPTIONS or (own_seed and setting.name == "seed"):
            continue
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(_GROUP_TITLES.get(setting.group, setting.group))
        _add_setting(groups[setting.group], setting)
    add_foreign_options(parser, engine_keywords(), except_for=_OPTIONS_OF_COMMANDS)


def engine_args(args: argparse.Namespace) -> EngineArgs:
    """The EngineArgs of a parsed command line.

    Raises:
        ConfigError: A value is invalid.
    """
    names, foreign = {setting.name for setting in EngineArgs.options()}, engine_keywords()
    given = {
        name: value
        for name, value in vars(args).items()
        if name in names or (name not in _OPTIONS_OF_COMMANDS and find_foreign(name, foreign))
    }
    if args.own_seed and given.get("seed", 0) < 0:  # valid for requests, invalid for the engine
        del given["seed"]
    return EngineArgs.from_kwargs(**given)


def require_model(args: argparse.Namespace) -> None:
    """Checks that a model is given.

    Raises:
        ConfigError: No model is given.
    """
    if getattr(args, "model", None) is None:
        raise ConfigError("No model is given. Name one, as MODEL or with --model, or a running server with --url.")


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int | None, several: bool = False) -> None:
    """Adds one option per sampling parameter.

    Args:
        max_tokens: The command's default; None for the rest of the context.
        several: Whether the command supports several sequences per prompt (`n`).
    """
    group = parser.add_argument_group("sampling", "Defaults come from the model's generation_config.json.")
    help_texts = attribute_help(SamplingParams)
    hints = typing.get_type_hints(SamplingParams) | {"negative_prompt": str | None}  # not as token ids
    default = "the rest of the context" if max_tokens is None else str(max_tokens)
    for field in msgspec.structs.fields(SamplingParams):
        if field.name in _NOT_SAMPLING_OPTIONS or (field.name == "n" and not several):
            continue
        text = help_texts[field.name]
        if field.name == "max_tokens":
            text += f" Default: {default}."
        _add_sampling_option(group, field.name, hints[field.name], text)
    group.add_argument("--seed", type=int, default=argparse.SUPPRESS, help="Makes the output reproducible.")
    parser.set_defaults(default_max_tokens=max_tokens)


def sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """`defaults` with the sampling parameters of a parsed command line.

    Raises:
        RequestError: A value is out of range.
    """
    names = {field.name for field in msgspec.structs.fields(SamplingParams)} - {"logits_processors"}
    given = {name: value for name, value in vars(args).items() if name in names}
    if "max_tokens" not in given and defaults.max_tokens == SamplingParams().max_tokens:
        given["max_tokens"] = args.default_max_tokens
    return msgspec.structs.replace(defaults, **given)


def attribute_help(cls: type) -> dict[str, str]:
    """Help texts by attribute, from the `Attributes:` section of a class's docstring."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + section):
        name, _, text = entry.strip().partition(":")
        if name:
            texts[name] = " ".join(text.replace("`", "").split())
    return texts


def _add_setting(group: Any, setting: Option) -> None:
    if setting.name == "model":
        group.add_argument(
            *option_flags(setting),
            action=ModelAction,
            metavar="TEXT",
            dest="model",
            default=argparse.SUPPRESS,
            help=option_help(setting),
        )
    else:
        add_option(group, setting)


def _add_sampling_option(group: Any, name: str, hint: Any, text: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if bool in kinds:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif list[str] in kinds or list[int] in kinds:
        common["help"] += " May be given several times."
        group.add_argument(flag, action="append", type=int if list[int] in kinds else str, metavar="TEXT", **common)
    else:
        is_float = float in kinds
        group.add_argument(
            flag, type=float if is_float else human_readable_int, metavar="X" if is_float else "N", **common
        )
