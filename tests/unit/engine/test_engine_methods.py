"""Attributes of engines that other packages add, and those of packages that are not installed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mvllm import LLM, AsyncLLM, LLMEngine
from mvllm.engine.engine_methods import AddedMethods
from mvllm.installation import install_command
from tests.helpers.plugins import prepend, write_metadata


def count_words(engine: AddedMethods) -> Callable[[str], str]:
    return lambda text: f"{type(engine).__name__}: {len(text.split())}"


@pytest.mark.parametrize("kind", [LLM, LLMEngine, AsyncLLM])
def test_an_engine_has_the_attributes_that_packages_add(
    kind: type[AddedMethods], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = f"[mvllm.engine_methods]\ncount_words = {__name__}:count_words\n_hidden = {__name__}:count_words\n"
    prepend(monkeypatch, [str(write_metadata(tmp_path, "words", group))])
    engine = kind.__new__(kind)
    assert getattr(engine, "count_words")("a b c") == f"{kind.__name__}: 3"  # noqa: B009  (type checkers do not know it)
    assert not hasattr(engine, "_hidden")
    with pytest.raises(AttributeError, match=f"^'{kind.__name__}' object has no attribute 'count_letters'$"):
        engine.count_letters  # type: ignore[attr-defined]  # noqa: B018


def test_a_method_of_a_missing_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    engine = LLM.__new__(LLM)
    command = re.escape(install_command("mvllm-image-generation"))
    message = (
        rf"^LLM\.generate_images needs the package mvllm-image-generation, which is not installed\. Run: {command}$"
    )
    with pytest.raises(AttributeError, match=message):
        engine.generate_images("a house")
    assert not hasattr(engine, "images")


@pytest.mark.parametrize("kind", [LLM, LLMEngine, AsyncLLM])
def test_an_attribute_error_within_a_property_is_not_hidden(kind: type[AddedMethods]) -> None:
    class Engine(kind):  # type: ignore[valid-type, misc]
        @property
        def doubled(self) -> int:
            return self.no_such_part.count * 2  # type: ignore[no-any-return]

    with pytest.raises(AttributeError, match=r"no attribute 'no_such_part'$"):
        Engine.__new__(Engine).doubled  # noqa: B018
