"""`--models FILE` and `--models-dir FOLDER`: entries, their defaults, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from mvllm.entrypoints.cli import serve
from mvllm.entrypoints.cli.main import main
from mvllm.extension_api import ConfigError
from mvllm.extension_api.cli import ServeCommand, ServerSettings
from mvllm_router.model_entry import ModelEntry
from mvllm_router.model_server import engine_arguments, model_server_settings
from mvllm_router.models_file import ModelsReader, check_names


def reader(*arguments: str, keep_alive: float | None = None) -> ModelsReader:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(arguments)
    command = ServeCommand(args, ServerSettings(), serve.add_arguments, serve._model)
    return ModelsReader(command, keep_alive)


def entries(tmp_path: Path, text: str, *arguments: str, suffix: str = "yaml") -> dict[str, ModelEntry]:
    path = tmp_path / f"models.{suffix}"
    path.write_text(text)
    return {entry.name: entry for entry in reader(*arguments, keep_alive=60.0).read_file(str(path))}


def test_an_entry_overrides_the_defaults_of_the_file_which_override_the_command_line(tmp_path: Path) -> None:
    text = """
    defaults: {max-num-seqs: 8, keep-alive: 5m}
    models:
      plain: demo
      full:
        model: demo
        aliases: [a, b]
        pinned: true
        keep_alive: -1
        max-concurrent-requests: 4
        memory: 2G
        env: {CUDA_VISIBLE_DEVICES: 1}
        max-num-seqs: 16
        enable-prefix-caching: false
        tool-call-parser: hermes
        kv-cache-memory-bytes: 64M
    """
    found = entries(tmp_path, text, "--max-num-seqs", "4", "--max-model-len", "1k", "--reasoning-parser", "none")
    plain, full = found["plain"], found["full"]
    assert (plain.engine.max_num_seqs, plain.engine.max_model_len, plain.keep_alive) == (8, 1000, 300.0)
    assert (full.engine.max_num_seqs, full.engine.max_model_len, full.keep_alive) == (16, 1000, None)
    assert full.engine.enable_prefix_caching is False and full.engine.kv_cache_memory_bytes == 64 << 20
    assert full.names == ("full", "a", "b") and full.is_pinned and full.max_concurrent_requests == 4
    assert full.memory_bytes == 2 << 30 and full.environment == {"CUDA_VISIBLE_DEVICES": "1"}
    assert (full.settings.tool_call_parser, full.settings.reasoning_parser) == ("hermes", "none")
    assert (plain.settings.tool_call_parser, plain.is_pinned) == ("auto", False)
    of_server = model_server_settings(full, "key")
    assert of_server.served_model_names == ("full", "a", "b") and of_server.router_key == "key"
    assert engine_arguments(full.engine)["max_num_seqs"] == 16 and "seed" not in engine_arguments(full.engine)


def test_toml_has_the_same_entries(tmp_path: Path) -> None:
    found = entries(tmp_path, '[models.m]\nmodel = "demo"\nmax-num-seqs = 2\n', suffix="toml")
    assert found["m"].engine.max_num_seqs == 2 and found["m"].keep_alive == 60.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {}", "must have `models`"),
        ("model: {a: demo}", "found model"),
        ("[", "is not YAML"),
        ("models: {a: {}}", "models: a names no model"),
        ("models: {a: [demo]}", "models: a: must be options of a model"),
        (
            "models: {a: {model: demo, port: 80}}",
            "port concerns the whole server. Give it on the command line, as --port",
        ),
        ("models: {a: {model: demo, max-num-sequences: 8}}", "not an option of a model. Did you mean max-num-seqs?"),
        ("models: {a: {model: demo, max-num-seqs: many}}", "models: a: max-num-seqs: must be an integer"),
        ("models: {a: {model: demo, block-size: -1}}", "models: a: block_size must be"),
        ("models: {a: {model: demo, keep-alive: soon}}", "keep-alive: must be seconds, or a duration .* found 'soon'"),
        ("models: {a: {model: demo, pinned: 1}}", "pinned: must be true or false"),
        ("models: {a: {model: demo, memory: none}}", "memory: must be an integer"),
        ("models: {a: {model: demo, lora-modules: [x=/y]}}", "models: a: --lora-modules needs --enable-lora"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        entries(tmp_path, text)


def test_names_are_different(tmp_path: Path) -> None:
    found = entries(tmp_path, "models: {a: demo, b: {model: demo, aliases: a}}")
    with pytest.raises(ConfigError, match="The models 'a' and 'b' both have the name 'a'"):
        check_names(list(found.values()))


def test_a_folder_has_the_models_in_it(tmp_path: Path) -> None:
    for name in (
        "folder/config.json",
        "quantized/x-Q4_0.gguf",
        "one-Q8_0.gguf",
        "big-00001-of-00002.gguf",
        "notes.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("big-00002-of-00002.gguf", "mmproj-x.gguf", "empty/readme.md", ".hidden/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = {entry.name: entry.engine.model for entry in reader().read_folder(str(tmp_path))}
    assert found == {
        "folder": str(tmp_path / "folder"),
        "quantized": str(tmp_path / "quantized"),
        "one-Q8_0": str(tmp_path / "one-Q8_0.gguf"),
        "big": str(tmp_path / "big-00001-of-00002.gguf"),
    }
    with pytest.raises(ConfigError, match="cannot be read"):
        reader().read_folder(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo",), "--model 'demo' is given with --models"),
        (("--api-server-count", "2"), "--api-server-count is for one model"),
        (("--served-model-name", "x"), "--served-model-name is for one model"),
        (("--keep-alive", "x"), "--keep-alive must be seconds"),
        (("--max-loaded-models", "1"), "2 models are pinned"),
        (("--responses-store", "x.db"), "b: max-stored-responses is given for one model, but with --responses-store"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.yaml").write_text(
        "{models: {a: {model: demo, pinned: true}, b: {model: demo, pinned: true, max-stored-responses: 5}}}"
    )
    assert main(["serve", *arguments, "--models", str(tmp_path / "m.yaml"), "--port", "0"]) == 1
    assert message in capsys.readouterr().err
