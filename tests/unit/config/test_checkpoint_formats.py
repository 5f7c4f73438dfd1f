"""Checkpoint formats of packages: what opens them, what they answer, and what is said where a package is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mvllm import plugin_groups
from mvllm.checkpoint_formats.registry import checkpoint_format, format_of_folder, is_derived_folder
from mvllm.config.cached_models import list_cached_models
from mvllm.config.engine_args import EngineArgs
from mvllm.config.hub import find_model
from mvllm.config.model_fingerprint import weights_fingerprint
from mvllm.config.option import options_of
from mvllm.errors import ConfigError, ModelError
from mvllm.installation import install_command
from mvllm.layers.quantization.registry import supported_methods
from mvllm.models.checkpoint import read_checkpoint
from tests.helpers.plugins import prepend, write_metadata
from tests.unit.config.folders import LLAMA, write_folder

ACME = """
import contextlib
import json

from mvllm.extension_api import ModelError
from mvllm.extension_api.checkpoint_formats import CheckpointFormat, ModelFiles, TensorEntry


class Entry(TensorEntry):
    @contextlib.contextmanager
    def open_reader(self):
        yield self

    def read_into(self, target, entry, offset):
        target[:] = entry.file.read_bytes()[entry.start + offset :][: len(target)]


class Acme(CheckpointFormat):
    '''A line of JSON with the config, then one float32 per parameter of `x`.'''

    def is_model_file(self, path):
        return path.read_bytes().startswith(b'{"architectures"')

    def list_models(self, names):
        stems = sorted(name[:-5] for name in names if name.endswith(".acme"))
        return [ModelFiles(stem, (f"{stem}.acme",), stem.rpartition("-")[2]) for stem in stems]

    def choose(self, models, quantization, where, how):
        for model in models:
            if quantization in (None, model.quantization):
                return model
        raise ModelError(f"{where} has no {quantization}; say {how.format(models[0].quantization)}")

    def model_folder(self, path, *, with_tokenizer=True):
        folder = path.with_suffix(".derived")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_bytes(path.read_bytes().splitlines()[0])
        (folder / "acme_files.json").write_text(json.dumps({"files": [{"path": str(path)}]}))
        return folder

    def known_files(self):
        return []

    def read_tensors(self, folder, most_tensors, packed):
        [file] = json.loads((folder / "acme_files.json").read_text())["files"]
        path = folder.with_suffix(".acme")
        assert str(path) == file["path"]
        start = path.read_bytes().index(b"\\n") + 1
        return {"x": Entry("x", path, "F32", (2,), start, 8)}
"""


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str = ACME, value: str = "Acme") -> None:
    (folder / "acme_format.py").write_text(text)
    points = f"[mvllm.checkpoint_formats]\nacme = acme_format:{value}\n"
    prepend(monkeypatch, [str(write_metadata(folder, "acme-formats", points))])
    monkeypatch.delitem(sys.modules, "acme_format", raising=False)


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models of an installed format."""
    (tmp_path / "site").mkdir()
    install(monkeypatch, tmp_path / "site")
    models = tmp_path / "models"
    config = (write_folder(tmp_path / "written", LLAMA) / "config.json").read_bytes()
    models.mkdir()
    for name in ("m-small.acme", "m-tall.acme"):
        (models / name).write_bytes(config + b"\n" + b"\0\0\x80?\0\0\0@")
    return models


def test_a_file_is_opened_by_its_suffix_or_its_first_bytes(acme: Path) -> None:
    assert find_model(str(acme / "m-small.acme")) == acme / "m-small.derived"
    (acme / "m-small.acme").rename(acme / "m")
    assert find_model(str(acme / "m")) == acme / "m.derived"


def test_a_folder_is_asked_for_its_models(acme: Path) -> None:
    assert find_model(str(acme)) == acme / "m-small.derived"
    assert find_model(f"{acme}:tall") == acme / "m-tall.derived"
    with pytest.raises(ModelError, match=f"has no wide; say {acme}:small"):
        find_model(f"{acme}:wide")


def test_the_format_is_a_load_format_and_safetensors_come_first_without_it(acme: Path) -> None:
    (acme / "model.safetensors").touch()
    assert find_model(str(acme)) == acme
    assert find_model(str(acme), load_format="acme") == acme / "m-small.derived"
    [setting] = [each for each in options_of(EngineArgs) if each.name == "load_format"]
    assert setting.choices == ("auto", "safetensors", "acme", "gguf", "dummy")
    with pytest.raises(ModelError, match=r"load_format is 'safetensors', but .* is a model in ACME form"):
        find_model(str(acme / "m-small.acme"), load_format="safetensors")


def test_an_engine_reads_config_and_weights_of_the_derived_folder(acme: Path) -> None:
    model = str(acme / "m-small.acme")
    config = EngineArgs(model=model, skip_tokenizer_init=True).create_engine_config().model
    assert (config.architecture, config.path) == ("LlamaForCausalLM", acme / "m-small.derived")
    entry, value = read_checkpoint(config.path)["x"], bytearray(8)
    with entry.open_reader() as reader:
        reader.read_into(memoryview(value), entry, 0)
    assert value == b"\0\0\x80?\0\0\0@"
    assert is_derived_folder(config.path) and not is_derived_folder(acme)
    assert weights_fingerprint(config.path) == weights_fingerprint(acme / "m-small.acme")
    assert "acme" in supported_methods()


def test_tensors_of_another_type_name_the_format(acme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_model(str(acme / "m-small.acme"))
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path / "site")])
    for number, wrong in enumerate(('["x"]', '{"x": path}')):
        (other := tmp_path / f"other{number}").mkdir()
        install(monkeypatch, other, ACME.replace('{"x": Entry("x", path, "F32", (2,), start, 8)}', wrong))
        with pytest.raises(ModelError, match=r"read_tensors of the checkpoint format 'acme' should return a dict of"):
            read_checkpoint(folder)
        monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(other)])


def test_files_of_formats_are_listed_with_the_cached_models(
    acme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mvllm.config.cached_models._repositories", list)
    text = (tmp_path / "site" / "acme_format.py").read_text()
    known = text.replace("return []", f"from pathlib import Path; return [[Path({str(acme / 'm-tall.acme')!r})]]")
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path / "site")])
    install(monkeypatch, tmp_path / "other", known)
    found = {model.name: model.quantization for model in list_cached_models()}
    assert found[str(acme / "m-tall.acme")] == "tall"


def test_an_object_that_is_no_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path, "Acme = dict")
    with pytest.raises(ConfigError, match=r"acme-formats 0\.1\.0.*must name a subclass of .*CheckpointFormat"):
        checkpoint_format("acme", "The model 'x'")


def test_a_class_that_lacks_methods_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path, ACME.replace("def known_files", "def _known_files"))
    with pytest.raises(ConfigError, match=r"acme-formats 0\.1\.0.* lacks methods of CheckpointFormat: known_files\."):
        checkpoint_format("acme", "The model 'x'")


def test_a_folder_without_its_list_of_files_is_refused(
    acme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ACME.replace('(folder / "acme_files.json").write_text', "str")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path / "site")])
    (tmp_path / "other").mkdir()
    install(monkeypatch, tmp_path / "other", text)
    with pytest.raises(ConfigError, match=r"format 'acme' has made .*m-tall\.derived .* without acme_files\.json"):
        find_model(str(acme / "m-tall.acme"))


def test_a_file_of_a_format_that_is_not_allowed_names_its_package(acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin_groups.ENVIRONMENT_VARIABLE, "another")
    with pytest.raises(ConfigError, match=r"'acme' is offered by acme-formats 0\.1\.0"):
        find_model(str(acme / "m-tall.acme"))


# ------------------------------------------------------------------------------------------------- without the package


@pytest.fixture
def no_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a search path without checkpoint formats."""
    list_plugins = plugin_groups.list_plugins
    monkeypatch.setattr(
        plugin_groups,
        "list_plugins",
        lambda group: [] if group is plugin_groups.CHECKPOINT_FORMATS else list_plugins(group),
    )
    prepend(monkeypatch, [str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("m-Q8_0.gguf", "folder/m-Q8_0.gguf", "folder/m-Q4_0.gguf"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("name", ["m-Q8_0.gguf", "folder", "folder:Q8_0", "org/name/m-Q8_0.gguf"])
def test_a_file_of_a_missing_part_says_which_package_it_needs(name: str, no_formats: Path) -> None:
    with pytest.raises(ModelError) as refused:
        find_model(name)
    model = name.removesuffix(":Q8_0")
    assert str(refused.value) == (
        f"The model {model!r} needs the package mvllm-gguf, which is not installed. "
        f"Run: {install_command('mvllm-gguf')}"
    )


def test_a_folder_with_safetensors_beside_such_files_is_read(no_formats: Path) -> None:
    (no_formats / "folder" / "model.safetensors").touch()
    assert find_model("folder") == Path("folder")


def test_a_derived_folder_of_a_missing_part_says_which_package_it_needs(no_formats: Path) -> None:
    (no_formats / "folder" / "gguf_files.json").write_text("{}")
    assert format_of_folder(no_formats / "folder") == "gguf"
    with pytest.raises(ModelError, match=r"model folder '.*folder' needs the package mvllm-gguf"):
        read_checkpoint(no_formats / "folder")
