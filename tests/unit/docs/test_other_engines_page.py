"""docs/how-to/coming-from-other-engines.md: commands, options, modules and variables of mvllm in its tables exist."""

from __future__ import annotations

import argparse
import importlib
import re

import pytest

from mvllm import LLM, AsyncLLM, SamplingParams
from mvllm.config.engine_args import EngineArgs
from mvllm.config.env import KNOWN_VARIABLES
from mvllm.entrypoints.cli.argument_parser import find_subcommand
from mvllm.entrypoints.cli.main import COMMANDS, PART_COMMANDS, _make_parser, load_command
from mvllm.entrypoints.openai.client_request import ForeignGenerationFields
from mvllm.entrypoints.openai.protocol import CompletionRequest
from mvllm.installable import installable_parts
from tests.unit.docs.guide_tables import DOCS

PAGE = (DOCS / "how-to" / "coming-from-other-engines.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and line.count("|") == 3
]
FIELDS = set(CompletionRequest.__struct_fields__)
REFUSED = set(ForeignGenerationFields.__struct_fields__)
SAME_OPTION = {"--guided-decoding-backend", "--gpu-memory-utilization"}
OURS = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1])]


def options_of(command: str) -> set[str]:
    parser: argparse.ArgumentParser = find_subcommand(_make_parser(command, load_command(command)), [command])[0]
    return {text for action in parser._actions if action.help != argparse.SUPPRESS for text in action.option_strings}


def test_the_tables_have_rows() -> None:
    assert len(ROWS) > 50


@pytest.mark.parametrize("command", sorted({name.split()[1] for name in OURS if name.startswith("mvllm ")}))
def test_a_command_exists(command: str) -> None:
    assert command in {*COMMANDS, *installable_parts()}.union(*PART_COMMANDS.values())


def test_options_exist() -> None:
    known = options_of("serve") | options_of("generate") | {"--system"}  # of `mvllm run`, which is another package's
    named = {option for name in OURS for option in re.findall(r"--[\w-]+", name) if not name.startswith("mvllm ")}
    assert named and not named - known


def test_settings_parameters_and_fields_exist() -> None:
    """Names in Python and of requests, in the tables of engines whose names differ."""
    settings = {name for option in EngineArgs.options() for name in (option.name, *option.aliases)}
    known = settings | set(SamplingParams.__struct_fields__) | FIELDS | {"llm", "tensors", "path"}
    known |= {name for cls in (LLM, AsyncLLM) for name in dir(cls)}
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    text = "\n".join(each for each in sections if each.startswith(("SGLang", "Text Gen", "TensorRT", "transformers")))
    ours = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ") and line.count("|") == 3]
    names = {name for cell in ours for name in re.findall(r"`([a-z]\w*_\w+)`", cell)}
    names |= {name for cell in ours for name in re.findall(r"\b([a-z]\w+)=", cell)}
    assert len(names) > 20 and names - known == set()
    assert "watermarking" in REFUSED


@pytest.mark.parametrize(
    "name", ["no_stop_trim", "lora_path", "stop_regex", "custom_logit_processor", "return_hidden_states", "typical_p"]
)
def test_fields_that_the_page_calls_refused_are(name: str) -> None:
    assert f"`{name}`" in PAGE and name in REFUSED


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "ignore_eos", "stop_token_ids", "best_of"])
def test_fields_that_keep_their_name_are_known(name: str) -> None:
    assert f"`{name}`" in PAGE and name in FIELDS - REFUSED


def test_no_option_of_the_other_engines_is_taken_for_another_one() -> None:
    """What the page translates is unknown here: an option that is accepted needs no row."""
    theirs = {
        option
        for row in ROWS[: next(i for i, row in enumerate(ROWS) if row[0] == "Ollama")]
        for option in re.findall(r"--[a-z][\w-]*", row[0])
    }
    known = options_of("serve")
    assert len(theirs) > 30 and {name for name in theirs if name in known} <= SAME_OPTION


def test_modules_and_variables_exist() -> None:
    modules = {name for name in OURS if re.fullmatch(r"mvllm(\.\w+)*", name)}
    assert len(modules) > 8
    for name in modules:
        importlib.import_module(name)
    assert {name for name in OURS if name.startswith("MVLLM_")} <= KNOWN_VARIABLES.keys()
