"""Loads a model's processor of transformers.

Without torchvision, image processors are those that compute with Pillow and numpy, and there are no video processors: a
processor that has one is built without it, and the family of the model prepares frames itself (`item_families.frames`).
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mvllm.errors import ModelError, plain_reason
from mvllm.installation import install_command
from mvllm.multimodal import installed_packages


def load_processor(path: Path, *, trust_remote_code: bool = False) -> Any:
    """The processor of a model folder.

    Raises:
        ModelError: There is none, or it cannot be built.
    """
    transformers = importlib.import_module("transformers")
    arguments = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        if (substitute := _substitute(path)) is not None:
            return substitute(path, arguments)
        kind = _class_with_videos(transformers, path)
        if kind is not None and not installed_packages.is_installed(_TORCHVISION):
            return _without_video_processor(kind).from_pretrained(str(path), backend="pil", **arguments)
        try:
            return transformers.AutoProcessor.from_pretrained(str(path), **arguments)
        except (OSError, ValueError):  # for example: the folder says nothing of videos
            if kind is None:
                raise
            return _without_video_processor(kind).from_pretrained(str(path), **arguments)
    except Exception as e:
        hint = "The folder needs the model's preprocessor_config.json or processor_config.json."
        if not installed_packages.is_installed("PIL") and re.search(r"\bPIL\b|pillow", str(e), re.IGNORECASE):
            raise ModelError(
                "Images in prompts need the package Pillow, which is not installed where the engine runs. "
                f"Run: {install_command('mvllm[multimodal]')}"
            ) from e
        if isinstance(e, ImportError):
            hint = "Install the package where the engine runs."
        raise ModelError(
            f"The processor of {path}, which prepares images and audio, cannot be loaded: {plain_reason(e)}. {hint}"
        ) from e


_TORCHVISION = "torchvision"
_MODULE = "mvllm.multimodal.item_families.substitute_processors"
_SUBSTITUTES = {
    "SmolVLMProcessor": ((_TORCHVISION, "num2words"), f"{_MODULE}:smolvlm_processor"),
    "PixtralProcessor": ((_TORCHVISION,), f"{_MODULE}:pixtral_processor"),
    "Lfm2VlProcessor": ((_TORCHVISION,), f"{_MODULE}:lfm2_vl_processor"),
}
"""By processor class: packages without which transformers cannot build it, and the function that builds it then, as
`module:function`. It takes the folder and the arguments of `from_pretrained`."""


def _substitute(path: Path) -> Callable[[Path, dict[str, Any]], Any] | None:
    packages, function = _SUBSTITUTES.get(_class_name(path) or "", ((), ""))
    if all(map(installed_packages.is_installed, packages)):
        return None
    module, name = function.split(":")
    found: Callable[[Path, dict[str, Any]], Any] = getattr(importlib.import_module(module), name)
    return found


def _class_with_videos(transformers: Any, path: Path) -> Any:
    """The class of transformers that the folder names, if it has a video processor; None otherwise."""
    name = _class_name(path)
    kind = None if name is None else getattr(transformers, name, None)
    return kind if kind is not None and "video_processor" in kind.get_attributes() else None


def _class_name(path: Path) -> str | None:
    """The processor class that the folder names, or that of its model type."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    names = (_read(path / name).get("processor_class") for name in _FILES)
    name = next(filter(None, names), None) or PROCESSOR_MAPPING_NAMES.get(_read(path / "config.json").get("model_type"))
    return name if isinstance(name, str) else None


_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _without_video_processor(kind: Any) -> Any:
    """A processor class that is built without its video processor: the attribute is None."""

    class WithoutVideoProcessor(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == _VIDEO and argument is None:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

        @classmethod
        def _get_arguments_from_pretrained(cls, path: Any, processor_dict: Any = None, **settings: Any) -> list[Any]:
            names: list[str] = kind.get_attributes()
            rest = classmethod(lambda _: [name for name in names if name != _VIDEO])
            others: Any = type(kind.__name__, (kind,), {"get_attributes": rest})
            found: list[Any] = others._get_arguments_from_pretrained(path, processor_dict, **settings)
            found.insert(names.index(_VIDEO), None)
            return found

    WithoutVideoProcessor.__name__ = kind.__name__
    return WithoutVideoProcessor


_VIDEO = "video_processor"
