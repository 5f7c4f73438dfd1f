"""Messages of the engine in the words of the command line."""

from __future__ import annotations

import argparse

import pytest

from mvllm.entrypoints.cli.option_words import in_options, option_names


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-utilization", "--gpu-memory-utilization", dest="memory_utilization")
    for name in ("max-model-len", "hf-overrides", "tokenizer", "seed", "quantization"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--enable-chunked-prefill", action=argparse.BooleanOptionalAction)
    parser.add_argument("--hidden-one", help=argparse.SUPPRESS)
    return parser


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Pass max_model_len.", "Pass --max-model-len."),
        ("with tokenizer='FOLDER'.", "with --tokenizer FOLDER."),
        ("with quantization='int8' or quantization='int4'.", "with --quantization int8 or --quantization int4."),
        ("set enable_chunked_prefill=True.", "set --enable-chunked-prefill."),
        ("set enable_chunked_prefill=False, or", "set --no-enable-chunked-prefill, or"),
        ("Pass hf_overrides={'a': True, 'b': {}}.", 'Pass --hf-overrides \'{"a": true, "b": {}}\'.'),
        ("seed must be an integer", "--seed must be an integer"),
        ("the seed must be an integer of the tokenizer", "the seed must be an integer of the tokenizer"),
        ("/models/max_model_len/x and 'max_model_len'", "/models/max_model_len/x and 'max_model_len'"),
        ("unrecognized arguments: --temprature=1 'x'", "unrecognized arguments: --temprature=1 'x'"),
        ("hidden_one is of another engine", "hidden_one is of another engine"),
    ],
)
def test_names_of_settings_become_options(parser: argparse.ArgumentParser, message: str, expected: str) -> None:
    assert in_options(message, option_names(parser)) == expected


def test_of_an_option_with_two_names_the_one_that_was_typed_is_named(parser: argparse.ArgumentParser) -> None:
    said = "memory_utilization must be a number"
    assert in_options(said, option_names(parser)).startswith("--memory-utilization must")
    assert in_options(said, option_names(parser, ["--gpu-memory-utilization=3"])).startswith("--gpu-memory-util")
