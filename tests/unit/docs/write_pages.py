"""Regenerates every generated page and table of docs.

python -m tests.unit.docs.write_pages
"""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

GENERATORS = (
    *("cli_page", "python_api_page", "metrics_page", "null_device_page"),
    *("guide_tables", "models_page", "platforms_page", "features_page", "http_examples", "badges"),
)

if __name__ == "__main__":
    sys.argv[1:] = []
    for name in GENERATORS:
        runpy.run_module(f"tests.unit.docs.{name}", run_name="__main__")
    root = Path(__file__).parents[3]
    for path in sorted(root.glob("plugins/*/tests/*_page.py")):
        runpy.run_path(str(path), run_name="__main__")
    subprocess.run([sys.executable, root / "ci" / "plugin_figures.py", "--write"], check=True)
    subprocess.run([sys.executable, root / "ci" / "performance_charts.py"], check=True)
    if importlib.util.find_spec("triton") is not None:
        subprocess.run([sys.executable, "-m", "platforms.torch-gpu.tests.step_costs"], cwd=root, check=True)
