"""The demo models, which ship with the package as folders of weights and a tokenizer: a very small Llama, and the same
model with a vision tower that names coloured shapes in pictures.

Importing this costs nothing; the two paths are all that the engine needs.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def demo_model_path() -> Path:
    """The folder of the trained demo model (config.json, model.safetensors, tokenizer), as it was installed.

    Raises FileNotFoundError when the package was installed without its model, or from an archive that has no folders.
    """
    return _folder("model")


def demo_vision_model_path() -> Path:
    """The folder of the trained demo vision model, with its processor. Raises as `demo_model_path`."""
    return _folder("vision_model")


def _folder(name: str) -> Path:
    folder = Path(str(files(__package__) / name))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"the demo model is not in {folder}. mvllm must be installed as files: docs/how-to/install.md says how"
        )
    return folder
