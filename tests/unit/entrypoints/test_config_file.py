"""`--config FILE`: entries of the file become command-line arguments, and the command line overrides the file."""

from __future__ import annotations

import argparse

import pytest

from mvllm.entrypoints.cli.arguments import add_engine_arguments
from mvllm.entrypoints.cli.config_file import expand_config
from mvllm.entrypoints.cli.main import main
from mvllm.errors import ConfigError
from tests.unit.entrypoints.builders import save_model_folder, use_fake_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def clients(monkeypatch):
    return use_fake_engine(monkeypatch)


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return str(path)

    return write


def make_parser():
    parser = argparse.ArgumentParser(prog="prog")
    command = parser.add_subparsers().add_parser("go", allow_abbrev=False)
    command.add_argument("--names", nargs="+")
    command.add_argument("--fast", action="store_true")
    command.add_argument("--key", action="append", default=[])
    add_engine_arguments(command, model_required=False)
    return parser


def parse(*arguments):
    parser = make_parser()
    return vars(parser.parse_args(expand_config(parser, arguments)))


def test_options_of_every_kind_are_read(config):
    path = config(
        "model: some/model\nmax-model-len: 64\nenable_prefix_caching: false\nasync-scheduling: true\nfast: true\n"
        "hf_overrides: {a: [1, 2]}\ngpu_memory_utilization: 0.5\nnames: [a, b]\nkey: [x, -y]\ndtype: float32\n"
        "quantization: null\n"
    )
    found = parse("go", "--config", path)
    expected = {
        "model": "some/model",
        "max_model_len": 64,
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "fast": True,
        "hf_overrides": {"a": [1, 2]},
        "memory_utilization": 0.5,
        "names": ["a", "b"],
        "key": ["x", "-y"],
        "dtype": "float32",
    }
    assert {name: found[name] for name in expected} == expected
    assert "quantization" not in found


def test_flags_override_the_file(config):
    path = config(
        "model: in-file\nmax_model_len: 64\nenable_prefix_caching: false\nkey: [a]\nmemory_utilization: 0.5\n"
        "names: [f]\nblock_size: 16\n"
    )
    flags = ["--max-model-len=32", "--enable-prefix-caching", "--key", "b", "--gpu-memory-utilization", "0.25"]
    for arguments in ([*flags, "--config", path], [f"--config={path}", *flags]):
        found = parse("go", *arguments)
        assert (found["max_model_len"], found["enable_prefix_caching"], found["key"]) == (32, True, ["b"])
        assert (found["memory_utilization"], found["model"], found["block_size"]) == (0.25, "in-file", 16)


@pytest.mark.parametrize("arguments", [["named", "--fast"], ["--block-size", "8", "named"], ["--fast", "named"]])
def test_a_positional_model_overrides_the_file(config, arguments):
    path = config("model: in-file\nnames: [f, g]\n")
    found = parse("go", *arguments, "--config", path)
    assert (found["model"], found["names"]) == ("named", ["f", "g"])
    assert parse("go", "--block-size", "8", "--config", path)["model"] == "in-file"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_modle_len: 3", ["max_modle_len is not an option of `prog go`", "Did you mean max-model-len?"]),
        ("zzzzzz: 3", ["zzzzzz", "prog go --help"]),
        ("config: other.yaml", ["config is not an option"]),
        ("no_enable_prefix_caching: true", ["Did you mean enable-prefix-caching?"]),
        ("max_model_len: many", ["max_model_len", "an integer", "'many'"]),
        ("max_model_len: [1, 2]", ["max_model_len", "one value", "a list"]),
        ("max_model_len: true", ["max_model_len", "found true"]),
        ("fast: 1", ["fast", "true or false", "found 1"]),
        ("enable_prefix_caching: maybe", ["true or false", "'maybe'"]),
        ("dtype: float31", ["dtype", "one of auto, float32", "'float31'"]),
        ("hf_overrides: text", ["hf_overrides", "not valid JSON"]),
        ("names: [--fast]", ["names", "dash"]),
        ("- a\n- b", ["option: value"]),
        ("1: a", ["option: value"]),
        ("a: [", ["not YAML"]),
        ("a: !!python/object/apply:os.getcwd []", ["not YAML", "could not determine a constructor"]),
    ],
)
def test_errors_name_the_file_and_the_option(config, text, words):
    path = config(text)
    with pytest.raises(ConfigError) as caught:
        parse("go", "--config", path)
    assert path in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_an_empty_file_has_no_options(config):
    assert "model" not in parse("go", "--config", config("# nothing\n"))


def test_a_command_runs_with_it(folder, clients, config, capsys):
    path = config(f"model: {folder}\nprompt: [Hello]\nmax_tokens: 3\nstop: [a, b]\nmax-model-len: 99\ntop_p: 0.5\n")
    assert main(["generate", "--config", path, "--max-tokens", "5"]) == 0
    params = clients[0].requests[0].sampling_params
    assert (params.max_tokens, params.stop, params.top_p) == (5, ["a", "b"], 0.5)
    assert clients[0].config.model.max_model_len == 99


def test_a_missing_file_is_an_error_of_one_line(capsys):
    assert main(["generate", "--config", "/nowhere.yaml", "--prompt", "x"]) == 1
    error = capsys.readouterr().err
    assert "/nowhere.yaml" in error and "No such file" in error and error.count("\n") == 1


def test_serve_supports_config_files(config, capsys):
    assert main(["serve", "some-model", "--config", config("model: in-file\nport: 70000\n")]) == 1
    assert "--port is 70000" in capsys.readouterr().err  # not an error about two models
    assert main(["serve", "--config", config("modle: demo")]) == 1
    assert "modle is not an option of `mvllm serve`. Did you mean model?" in capsys.readouterr().err
