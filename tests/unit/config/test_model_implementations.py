"""Implementations of models for architectures without a class: found by name, asked first, and named where missing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mvllm import plugin_groups
from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.config.model_builder import build_model_config
from mvllm.config.model_implementations import find_implementation, model_impl_names, read_composite_config
from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import ConfigError, ModelError
from mvllm.installation import install_command
from mvllm.models.checkpoint_support import check_architecture
from mvllm.models.registry import resolve_model_class
from mvllm.multimodal.item_families import item_family
from tests.helpers.plugins import prepend, write_metadata

CODE = """
from mvllm.extension_api.model_implementations import CompositeConfig, ModelImplementation

class Wrapped(ModelImplementation):
    items = "acme_items:Items"

    def unsupported_reason(self, architecture):
        return None if architecture.startswith(("Acme", "Llama")) else "it wraps none but Acme's."

    def model_class(self, architecture):
        return "mvllm.models.opt:OPTForCausalLM" if architecture == "AcmeForCausalLM" else "acme_impl:Wrapped"

    def read_composite_config(self, whole):
        return CompositeConfig({"hidden_size": 48, "num_attention_heads": 4, "model_type": "acme"}, {"image": 7})

class Unfinished(ModelImplementation):
    def model_class(self, architecture):
        return ""
"""
ITEMS = """
from mvllm.extension_api.multimodal_models import ItemFamily

class Items(ItemFamily):
    pass
"""
TEXT = {"num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 64}
MISSING = (
    "through transformers needs the package mvllm-transformers-backend, which is not installed. "
    f"Run: {install_command('mvllm-transformers-backend')}"
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a package with implementations, by default `acme`."""

    def write(**names: str) -> None:
        points = {"acme": "acme_impl:Wrapped", **names}
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        folder = write_metadata(tmp_path / "site", "acme-models", f"[mvllm.model_impls]\n{lines}")
        (folder / "acme_impl.py").write_text(CODE)
        (folder / "acme_items.py").write_text(ITEMS)
        prepend(monkeypatch, [str(folder)])
        for module in ("acme_impl", "acme_items"):
            monkeypatch.delitem(sys.modules, module, raising=False)

    return write


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    list_plugins = plugin_groups.list_plugins
    monkeypatch.setattr(
        plugin_groups, "list_plugins", lambda group: [] if group is plugin_groups.MODEL_IMPLS else list_plugins(group)
    )


def write_config(folder: Path, architecture: str, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **values}))
    return folder


def build(folder: Path, model_impl: str = "auto") -> ModelConfig:
    return build_model_config(model="acme", folder=folder, tokenizer=None, model_impl=model_impl)


def test_names_of_installed_implementations_are_values_of_the_setting(install: Callable[..., None]) -> None:
    install()
    assert model_impl_names()[:2] == ("auto", "native")
    assert {"acme", "transformers"} <= {*model_impl_names()[2:]}
    assert "acme_impl" not in sys.modules


def test_a_named_implementation_gives_the_class_and_auto_gives_a_class_of_its_own_first(
    install: Callable[..., None],
) -> None:
    install()
    assert resolve_model_class("AcmeForCausalLM", "acme").__name__ == "OPTForCausalLM"
    assert resolve_model_class("LlamaForCausalLM").__name__ == "LlamaForCausalLM"
    with pytest.raises(ModelError, match=r"'Other' is not supported\. It wraps none but Acme's"):
        resolve_model_class("Other", "acme")
    with pytest.raises(ModelError, match=r"acme-models 0\.1\.0 .*subclass of mvllm\.extension_api\.CausalLM"):
        resolve_model_class("AcmeForOthers", "acme")


def test_auto_asks_the_fallback_for_an_architecture_without_a_class(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(transformers="acme_impl:Wrapped")
    monkeypatch.setenv(plugin_groups.ENVIRONMENT_VARIABLE, "acme-models")  # of two packages, this one
    assert resolve_model_class("AcmeForCausalLM").__name__ == "OPTForCausalLM"
    with pytest.raises(ModelError, match=r"'AcmeForCausalLM' is not supported: no class"):
        resolve_model_class("AcmeForCausalLM", "native")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("acme_items:Items", r"acme-models 0\.1\.0 .*subclass of mvllm\.extension_api\.model_implementations"),
        ("acme_impl:Unfinished", r"lacks methods of ModelImplementation: unsupported_reason"),
        ("acme_impl:Absent", r"acme_impl:Absent of acme-models 0\.1\.0.*cannot be loaded"),
    ],
)
def test_what_is_no_implementation_is_named(install: Callable[..., None], value: str, words: str) -> None:
    install(broken=value)
    with pytest.raises(ConfigError, match=words):
        find_implementation("broken")


def test_a_config_with_encoders_that_no_record_reads_is_read_by_the_implementation(
    install: Callable[..., None], tmp_path: Path
) -> None:
    install()
    folder = write_config(tmp_path / "m", "AcmeForConditionalGeneration", model_type="acme", text_config=TEXT)
    config = build(folder, "acme")
    assert (config.hidden_size, config.head_size, config.num_layers) == (48, 12, 2)
    assert config.multimodal == MultiModalModel({"image": 7}, embedding_width=48, by_transformers=True)


@pytest.mark.parametrize("architecture", ["Llama4ForConditionalGeneration", "Qwen3_5ForConditionalGeneration"])
def test_native_classes_that_take_text_alone_are_given_encoders_only_if_the_implementation_is_named(
    install: Callable[..., None], architecture: str, tmp_path: Path
) -> None:
    install()
    folder = write_config(tmp_path / "m", architecture, text_config=TEXT)
    assert read_composite_config(architecture, "auto", folder, None) is None
    assert read_composite_config(architecture, "native", folder, None) is None
    found = read_composite_config(architecture, "acme", folder, None)
    assert found is not None and found.placeholders == {"image": 7}
    assert read_composite_config("LlavaForConditionalGeneration", "acme", folder, None) is None  # its record reads it


def test_its_items_stand_before_those_of_the_family(install: Callable[..., None]) -> None:
    install()
    model, config = MultiModalModel({"image": 9}, by_transformers=True), HFConfig({}, "config.json")
    for architecture in ("AcmeForConditionalGeneration", "Idefics3ForConditionalGeneration"):
        found = item_family(architecture, SimpleNamespace(), model, config, "acme")
        native = item_family(architecture, SimpleNamespace(), MultiModalModel({"image": 9}), config)
        assert [base.__name__ for base in type(found).__bases__] == ["Items", type(native).__name__]


class TestWithoutThePackage:
    pytestmark = pytest.mark.usefixtures("nothing_installed")

    def test_an_architecture_without_a_class_says_which_package_it_needs(self, tmp_path: Path) -> None:
        values = {**TEXT, "hidden_size": 64, "num_attention_heads": 4}
        with pytest.raises(ModelError) as refused:
            build(write_config(tmp_path / "m", "AcmeForCausalLM", **values))
        text = str(refused.value)
        assert f"'AcmeForCausalLM' is not supported. Running 'AcmeForCausalLM' {MISSING}. The page docs" in text
        assert "\n" not in text
        with pytest.raises(ModelError, match=r"'AcmeForCausalLM' is not supported.*mvllm-transformers-backend"):
            resolve_model_class("AcmeForCausalLM")

    def test_a_class_of_its_own_runs_and_its_name_needs_the_package(self, tmp_path: Path) -> None:
        values = {**TEXT, "hidden_size": 64, "num_attention_heads": 4}
        folder = write_config(tmp_path / "m", "LlamaForCausalLM", **values)
        check_architecture(build(folder))
        with pytest.raises(ModelError) as refused:
            check_architecture(build(folder, "transformers"))
        wanted = f"not supported with model_impl='transformers'. Running 'LlamaForCausalLM' {MISSING}."
        assert wanted in str(refused.value)

    def test_the_architecture_is_checked_before_other_values(self, tmp_path: Path) -> None:
        folder = write_config(tmp_path / "m", "AcmeForConditionalGeneration", text_config=TEXT)  # no hidden_size
        with pytest.raises(ModelError, match=f"Running 'AcmeForConditionalGeneration' {re.escape(MISSING)}"):
            build(folder)
        with pytest.raises(ModelError, match="no class here, and model_impl is 'native'"):
            build(folder, "native")
        with pytest.raises(ModelError, match="'hidden_size'") as refused:
            build(write_config(tmp_path / "m", "LlamaForCausalLM", **TEXT))
        assert "package" not in str(refused.value)

    def test_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(ModelError, match=r"Running 'AcmeForCausalLM' through acme needs a package"):
            resolve_model_class("AcmeForCausalLM", "acme")
