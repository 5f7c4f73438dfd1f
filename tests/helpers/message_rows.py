"""Rows of the tables of mistakes: a command and what it says, tested in `test_messages.py` of core and of packages."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mvllm import plugin_groups
from mvllm.demo import demo_model_path
from mvllm.entrypoints.cli.main import main

_STARTS_OF_WORKERS = (
    "mvllm.engine.process.inproc_client.EngineCore",
    "mvllm.engine.process.sync_mp_client.SyncMPClient",
    "mvllm.engine.process.async_core_client.LaunchedCoreConnection",
    "mvllm.entrypoints.openai.server.process_manager.LaunchedCoreConnection",
)


@dataclass(frozen=True)
class Mistake:
    """A command line with a mistake, none of which starts a worker.

    Attributes:
        command: The words after `mvllm`; `{models}` stands for the folder of `write_broken_models`.
        says: The whole message, without `error: ` and the hint at `--help`; `{models}` as above, and `{demo}` is the
            folder of the demo model.
        status: Exit status: 2 for what the parser of the command line finds.
    """

    command: str
    says: str
    status: int = 1

    def __str__(self) -> str:
        return self.command.replace("{models}/", "")


def check_mistake(
    mistake: Mistake, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the command in this process; a start of a worker fails the test."""
    for target in _STARTS_OF_WORKERS:
        monkeypatch.setattr(target, _must_not_start)
    names = {"models": str(models), "demo": str(demo_model_path()), "cwd": str(Path.cwd())}
    words = [word.replace("{models}", names["models"]) for word in mistake.command.split(" ")]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        status: Any = main([word.replace("\N{NO-BREAK SPACE}", " ") for word in words])
    except SystemExit as e:
        status = e.code
    finally:
        for number, handler in handlers.items():  # a server's event loop sets others
            signal.signal(number, handler)
    errors = capsys.readouterr().err
    said = errors.partition("error: ")[2].partition("\n`mvllm")[0].strip()
    said = without_compat_hint(said)
    expected = mistake.says
    for name, value in names.items():
        expected = expected.replace(f"{{{name}}}", value)
    assert (said, status) == (expected, mistake.status), errors


def without_compat_hint(said: str) -> str:
    """A message without its last sentence, which names mvllm-compat where that is not installed."""
    hint = plugin_groups.missing_part_of(plugin_groups.FOREIGN_KEYWORDS)
    return said.removesuffix(hint).removesuffix(".") if hint and said.endswith(hint) else said


def _must_not_start(*args: object, **kwargs: object) -> NoReturn:
    raise AssertionError("a worker was started")


def write_broken_models(root: Path) -> Path:
    """Model folders and files with one fault each, by the name of the fault."""
    for name, edit in _FAULTS.items():
        folder = root / name
        shutil.copytree(demo_model_path(), folder, copy_function=os.symlink)
        edit(folder)
    (root / "empty").mkdir()
    (root / "fake.gguf").write_bytes(b"hello world, this is no such file")
    return root


def _replace(folder: Path, name: str, content: bytes) -> None:
    (folder / name).unlink(missing_ok=True)  # the link, not the file
    (folder / name).write_bytes(content)


def _set_keys(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_bytes()) | keys
    _replace(folder, "config.json", json.dumps({k: v for k, v in config.items() if v is not None}).encode())


def _remove(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def _pickle(folder: Path) -> None:
    _remove(folder, "model.safetensors")
    _replace(folder, "pytorch_model.bin", b"PK")


def _miss_a_shard(folder: Path) -> None:
    _remove(folder, "model.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors"}
    _replace(folder, "model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())


def _remove_template(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    settings.pop("chat_template", None)
    _remove(folder, "chat_template.jinja")
    _replace(folder, "tokenizer_config.json", json.dumps(settings).encode())


_T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True}
_FAULTS: Mapping[str, Callable[[Path], None]] = {
    "pickle": _pickle,
    "shard": _miss_a_shard,
    "truncated": lambda to: _replace(to, "model.safetensors", (to / "model.safetensors").read_bytes()[:1_000_000]),
    "pointer": lambda to: _replace(to, "model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha2"),
    "bad-template": lambda to: _replace(to, "chat_template.jinja", b"{% for m in messages %}\n{% endfr %}"),
    "bad-function": lambda to: _replace(to, "chat_template.jinja", b"\n{{ frob(messages) }}"),
    "no-tokenizer": lambda to: _remove(to, "tokenizer.json", "tokenizer_config.json"),
    "no-template": _remove_template,
    "bad-json": lambda to: _replace(to, "config.json", b'{"architectures": '),
    "unknown": lambda to: _set_keys(to, architectures=["LamaForCausalLM"], model_type="lama"),
    "own-code": lambda to: _set_keys(to, architectures=["MyNet"], model_type="my", auto_map={"AutoModel": "m.M"}),
    "t5": lambda to: _set_keys(to, max_position_embeddings=None, **_T5),
}
