"""What would keep a model's processor from being loaded, as far as it is seen without loading it."""

from __future__ import annotations

import importlib.util
import json

from mvllm.config.model import ModelConfig
from mvllm.installation import install_command

_FILES = ("preprocessor_config.json", "processor_config.json")
_PACKAGES = {"image": ("PIL",), "video": ("PIL", "av"), "audio": ("av",)}


def processor_problems(model: ModelConfig) -> list[str]:
    """One sentence for each problem; none for models of text. Reads a few small files and imports nothing."""
    if model.multimodal is None:
        return []
    takes = model.multimodal.modalities
    problems = []
    packages = dict.fromkeys(name for modality in takes for name in _PACKAGES[modality])
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        problems.append(
            f"Packages for {', '.join(takes)} as input are not installed ({', '.join(missing)}). "
            f"Run: {install_command('mvllm[multimodal]')}"
        )
    found = [file for name in _FILES if (file := model.path / name).is_file()]
    if not found:
        problems.append(
            f"{model.path} has no {' nor '.join(_FILES)}, which the model's processor needs. Prompts with "
            f"{', '.join(takes)} will be refused. Copy it from the model's origin."
        )
    for file in found:
        try:
            is_object = isinstance(json.loads(file.read_bytes()), dict)
        except (OSError, ValueError):
            is_object = False
        if not is_object:
            problems.append(f"{file} is not a JSON object, so prompts with {', '.join(takes)} will be refused.")
    return problems
