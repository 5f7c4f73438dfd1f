"""Configuration of Sphinx for the documentation's site; ci/docs_site.py builds it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

project = "mvllm"
author = "the mvllm contributors"
version = re.search(r'__version__ = "([^"]+)"', (ROOT / "core/mvllm/version.py").read_text())[1]
release = version
language = "en"

extensions = ["myst_parser"]
root_doc = "index"
myst_heading_anchors = 6  # names of headings as in the repository's own view
myst_links_external_new_tab = False
suppress_warnings = [
    "myst.header",  # a page may begin with a heading of the second level
    "misc.highlighting_failure",  # consoles and shortened examples are not whole programs
]
highlight_language = "text"

html_theme = "furo"
html_title = f"mvllm {version}"
html_copy_source = False
html_show_sphinx = False
