"""Regenerates every generated page and table of docs.

python -m tests.unit.docs.write_pages
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

GENERATORS = (
    *("cli_page", "python_api_page", "metrics_page", "operations_page", "graph_operations_page", "null_device_page"),
    *("guide_tables", "models_page", "platforms_page"),
)

if __name__ == "__main__":
    sys.argv[1:] = []
    for name in GENERATORS:
        runpy.run_module(f"tests.unit.docs.{name}", run_name="__main__")
    subprocess.run([sys.executable, Path(__file__).parents[3] / "ci" / "plugin_figures.py", "--write"], check=True)
