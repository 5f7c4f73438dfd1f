"""Where the published GGUF models are that tests/published runs; see ci/published.py.

Neither torch nor transformers is imported here.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "GGUF_TEST_FOLDER"
"""Names a folder with the files, instead of build/published."""
ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "build" / "published" / "packages"
"""Installed packages: the models' own, and what transformers needs to read GGUF files."""
FILES = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma": "gemma-3-270m-q4_k_m.gguf"}
MISSING = f"no published models: `python3 ci/dev.py test --published` fetches them, or {VARIABLE} names their folder"


def find_published(name: str) -> Path | None:
    """The file of a model of `FILES`, wherever it is below the folder; None if it is missing."""
    folder = Path(os.environ.get(VARIABLE) or ROOT / "build" / "published")
    return next((path for path in sorted(folder.rglob("*.gguf")) if path.name.lower() == FILES[name].lower()), None)
