"""Records of families: listed by name, imported alone and without torch, and the same for other packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mvllm import families
from mvllm.config.families import core_architectures, core_model_types, find_architecture, find_model_type
from mvllm.config.model import ModelConfig
from mvllm.config.model_builder import build_model_config
from mvllm.config.model_family import ModelFamily, ModelType
from mvllm.errors import ConfigError, ModelError
from mvllm.models.registry import resolve_model_class
from mvllm.multimodal.item_families.interface import ItemFamily
from tests.helpers.plugins import prepend, write_metadata
from tests.unit.config.folders import LLAMA, write_folder

MODULES = sorted({*families.architectures().values(), *families.model_types().values()})

RECORD = """
from mvllm.extension_api.model_families import Architecture, ModelFamily, ModelType, MultiModalModel

def read_items(hf):
    return MultiModalModel({"image": hf.positive_int("picture_id")}, embedding_width=hf.positive_int("hidden_size"))

FAMILY = ModelFamily(
    architectures={
        "AcmeForCausalLM": Architecture("acme_models:Acme", language_model="LlamaForCausalLM", read_items=read_items)
    },
    model_types={
        "llama": ModelType(
            head_dim=24,
            key_aliases={"width": "hidden_size"},
            read_config=lambda values: {**values, "picture_id": values["marker"]},
        )
    },
)
"""
CLASS = """
from mvllm.extension_api.multimodal_models import MultiModalCausalLM

class Acme(MultiModalCausalLM):
    def build_item_encoder(self, ctx):
        raise NotImplementedError
"""
CONFIG = {
    "architectures": ["AcmeForCausalLM"],
    "model_type": "llama",
    "width": 48,
    "marker": 7,
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("module", MODULES)
def test_a_record_has_the_names_that_it_is_listed_by(module: str) -> None:
    family = importlib.import_module(module).FAMILY
    assert isinstance(family, ModelFamily)
    assert set(family.architectures) == {name for name, where in families.architectures().items() if where == module}
    assert set(family.model_types) == {name for name, where in families.model_types().items() if where == module}


@pytest.mark.parametrize("name", core_model_types())
def test_the_architectures_that_a_model_type_stands_for_exist(name: str) -> None:
    architecture = find_model_type({"model_type": name}).architecture
    assert architecture is None or architecture in core_architectures()
    text_type = find_model_type({"model_type": name}).text_type
    assert text_type is None or find_model_type({"model_type": text_type}).architecture


def test_the_processing_of_items_that_records_name_exists() -> None:
    paths = {each.items for name in core_architectures() if (each := find_architecture(name)) and each.items}
    assert len(paths) > 10
    for path in paths:
        module, _, name = path.partition(":")
        assert issubclass(getattr(importlib.import_module(module), name), ItemFamily)


def test_records_load_neither_torch_nor_a_model() -> None:
    script = (
        f"import sys, importlib\nfor module in {MODULES!r}: importlib.import_module(module)\n"
        "models = 'mvllm.models', 'mvllm.multimodal'\n"
        "loaded = [m for m in sys.modules if m in ('torch', 'numpy') or m.startswith(models)]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_record_of_another_family_is_not_imported() -> None:
    script = (
        "import sys\nfrom mvllm.config.families import find_architecture, find_model_type\n"
        "find_architecture('Gemma4ForConditionalGeneration').items, find_model_type({'model_type': 'llama'})\n"
        "loaded = {m for m in sys.modules if m.startswith('mvllm.families.')}\n"
        "assert loaded == {'mvllm.families.' + m for m in ('plain', 'gemma4', 'gemma4.family')}, loaded"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_unknown_names_have_no_record() -> None:
    assert find_architecture("FooForCausalLM") is None
    assert find_model_type({"model_type": "foo"}) == find_model_type({}) == ModelType()
    assert find_model_type({"model_type": ["llama"], "architectures": "x"}) == ModelType()


class TestRecordsOfOtherPackages:
    @pytest.fixture
    def read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelConfig]:
        """Installs a package with a record, and reads a config.json of its architecture."""

        def build(record: str = RECORD, value: str = "acme_record") -> ModelConfig:
            folder = write_metadata(tmp_path / "site", "acme-models", f"[mvllm.models]\nAcmeForCausalLM = {value}\n")
            (folder / "acme_record.py").write_text(record)
            (folder / "acme_models.py").write_text(CLASS)
            prepend(monkeypatch, [str(folder)])
            for module in ("acme_record", "acme_models"):
                monkeypatch.delitem(sys.modules, module, raising=False)
            (tmp_path / "config.json").write_text(json.dumps(CONFIG))
            return build_model_config(model="acme", folder=tmp_path, tokenizer=None)

        return build

    def test_config_json_is_read_as_the_record_says_without_its_model(self, read: Callable[..., ModelConfig]) -> None:
        config = read()
        assert (config.hidden_size, config.head_size) == (48, 24)
        assert config.multimodal is not None and config.multimodal.placeholders == {"image": 7}
        assert not config.multimodal.by_transformers
        assert "acme_models" not in sys.modules

    def test_the_model_class_stands_before_that_of_the_language_model(self, read: Callable[..., ModelConfig]) -> None:
        read()
        found = resolve_model_class("AcmeForCausalLM")
        assert [base.__name__ for base in found.__bases__] == ["Acme", "LlamaForCausalLM"]

    def test_a_module_without_the_architecture_is_named(self, read: Callable[..., ModelConfig]) -> None:
        with pytest.raises(ModelError, match=r"acme-models 0\.1\.0 .*ModelFamily.*has this architecture"):
            read(RECORD.replace('"AcmeForCausalLM"', '"OtherForCausalLM"'))

    def test_a_record_that_cannot_be_imported_is_named(self, read: Callable[..., ModelConfig]) -> None:
        with pytest.raises(ConfigError, match=r"acme_record of acme-models 0\.1\.0.*no_such_driver"):
            read("import no_such_driver")

    def test_a_package_outside_the_allow_list_is_not_imported(
        self, read: Callable[..., ModelConfig], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MVLLM_PLUGINS", "")
        with pytest.raises(ConfigError, match=r"acme-models 0\.1\.0"):
            read()
        assert "acme_record" not in sys.modules
        with pytest.raises(ConfigError, match=r"acme-models 0\.1\.0"):
            resolve_model_class("AcmeForCausalLM")


TYPES = """
from mvllm.extension_api.model_families import Architecture, ModelFamily, ModelType, TokenSpace

def drop_table(config, source):
    config["table"] = len(config["table"])

def read_spaces(config, size, generation):
    return {"sound": TokenSpace("sound", first=size, size=9)}

FAMILY = ModelFamily(
    architectures={"AcmeForCausalLM": Architecture("acme_models:Acme", read_spaces=read_spaces)},
    model_types={
        "acme": ModelType(
            "AcmeForCausalLM", text_type="llama", text_defaults={"max_position_embeddings": 77}, simplify=drop_table
        )
    },
)
"""


def test_a_package_reads_a_config_without_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = (
        "[mvllm.models]\nAcmeForCausalLM = acme_family\n[mvllm.model_types]\nacme = acme_family\nother = acme_family\n"
    )
    folder = write_metadata(tmp_path / "site", "acme", points)
    (folder / "acme_family.py").write_text(TYPES)
    monkeypatch.delitem(sys.modules, "acme_family", raising=False)
    prepend(monkeypatch, [str(folder)])
    model = tmp_path / "model"
    text = {key: value for key, value in LLAMA.items() if key not in ("max_position_embeddings", "architectures")}
    write_folder(model, {"model_type": "acme", "table": "x" * 99, "text_config": text})
    config = build_model_config(model="m", folder=model, tokenizer=None)
    assert (config.architecture, config.max_model_len) == ("AcmeForCausalLM", 77)
    assert config.hf_config.get("table") == 99
    assert config.num_token_ids == config.vocab_size + 9
    write_folder(model, {**text, "model_type": "other"})
    with pytest.raises(ModelError, match=r"FAMILY is a ModelFamily of .* that has this model type"):
        build_model_config(model="m", folder=model, tokenizer=None)


def test_a_model_type_of_a_package_outside_the_allow_list_does_not_stop_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_metadata(tmp_path / "site", "acme", "[mvllm.model_types]\nacme = acme_family\n")
    prepend(monkeypatch, [str(folder)])
    monkeypatch.setenv("MVLLM_PLUGINS", "")
    write_folder(tmp_path, {**LLAMA, "model_type": "acme"})
    config = build_model_config(model="m", folder=tmp_path, tokenizer=None)
    assert config.architecture == LLAMA["architectures"][0]
    write_folder(tmp_path, {**{k: v for k, v in LLAMA.items() if k != "architectures"}, "model_type": "acme"})
    with pytest.raises(ConfigError, match=r"acme 0\.1\.0 .*which MVLLM_PLUGINS does not let in"):
        build_model_config(model="m", folder=tmp_path, tokenizer=None)


def test_a_family_of_a_missing_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    write_folder(tmp_path, {**LLAMA, "model_type": "janus"})
    with pytest.raises(ModelError, match="type 'janus' needs the package mvllm-image-generation"):
        build_model_config(model="m", folder=tmp_path, tokenizer=None)
