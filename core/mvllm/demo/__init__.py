"""The demo model: a very small Llama that ships with the package, as a folder of weights and a tokenizer.

Importing this costs nothing; ``demo_model_path()`` is all that the engine needs.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def demo_model_path() -> Path:
    """The folder of the trained demo model (config.json, model.safetensors, tokenizer), as it was installed.

    Raises FileNotFoundError when the package was installed without its model, or from an archive that has no folders.
    """
    folder = Path(str(files(__package__) / "model"))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"the demo model is not in {folder}; install mvllm from an unpacked folder or wheel: "
            "pip install --force-reinstall --no-deps mvllm"
        )
    return folder
