"""`mvllm plugin new`: creates a working platform plugin from a template.

The template is the folder `plugin_template`. Its files contain `@words@` that are replaced with the plugin's names.
"""

from __future__ import annotations

import argparse
import importlib.resources
import re
from pathlib import Path

from mvllm.extension_api import ConfigError
from mvllm.extension_api.installation import (
    CONTRACT,
    __version__,
    find_sources,
    install_command,
    is_own,
    uninstall_command,
)

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
LONGEST_NAME = 40
WORKFLOW = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*/[\w.-]+@[\w./-]+")
RESERVED = frozenset({"all", "any", "api", "auto", "core", "demo", "default", "mvllm", "none", "plugin", "testing"})
"""Words with another meaning in options or package names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="new")
    new = actions.add_parser(
        "new",
        help="create a platform plugin from a template",
        description="Writes the package mvllm-NAME: a working platform that uses the host as its device and passes the "
        "conformance suite. Replace its parts with your own.",
        allow_abbrev=False,
    )
    new.add_argument("name", metavar="NAME", help="The platform's name, as in --platform NAME.")
    new.add_argument(
        "--dir", metavar="PATH", type=Path, help="Folder to create. Default: mvllm-NAME in the current folder."
    )
    new.add_argument(
        "--graph",
        action="store_true",
        help="For a device with a compiler or runtime of its own: core passes it models as graphs. The package's "
        "compiler computes them in NumPy until you replace it.",
    )
    new.add_argument(
        "--workflow",
        metavar="OWNER/REPOSITORY@REF",
        help="A repository of mvllm on GitHub whose conformance workflow the plugin's workflow calls, at a branch, tag "
        "or commit. Default: a self-contained workflow.",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the package and prints the next steps."""
    check_name(args.name)
    if args.workflow is not None:
        check_workflow(args.workflow)
    folder = args.dir if args.dir is not None else Path(f"mvllm-{args.name}")
    written = write_plugin(args.name, folder, args.workflow, graph=args.graph)
    print(f"Wrote {len(written)} files of mvllm-{args.name} to {folder}. Next:\n")
    print(f"  {install_command(f'-e {folder}')}")
    print("  mvllm platforms")
    print(f'  mvllm generate --platform {args.name} --model demo --prompt "Once upon a time"')
    print(f"  mvllm conformance --platform {args.name}\n")
    print(f"Then replace its parts with your own, in the order that {folder / 'README.md'} gives.")
    return 0


def check_name(name: str) -> None:
    """Checks that a platform may have a name.

    Raises:
        ConfigError: The name is malformed, reserved or installed; the message suggests a similar valid name.
    """
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:LONGEST_NAME].strip("-")
        hint = f" For instance, use {near!r}." if NAME.fullmatch(near) else ""
        raise ConfigError(
            f"{name!r} is not a valid platform name: use lower-case letters and digits, beginning with a letter, in "
            f"words joined by single dashes, at most {LONGEST_NAME} characters.{hint}"
        )
    if name.startswith("mvllm-"):
        raise ConfigError(f"Leave out 'mvllm-': the package of a platform acme is called mvllm-acme. Found {name!r}.")
    if name in RESERVED or is_own(f"mvllm-{name}"):
        raise ConfigError(f"The name {name!r} is reserved. Choose another, for instance the name of your hardware.")
    owner = next((source for source in find_sources() if source.name == name), None)
    if owner is not None:
        raise ConfigError(
            f"A platform {name!r} is already installed: {owner}. Names must be unique. Choose another name, or run: "
            f"{uninstall_command(owner.distribution)}"
        )


def check_workflow(workflow: str) -> None:
    """Checks the form OWNER/REPOSITORY@REF.

    Raises:
        ConfigError: The text has another form.
    """
    if not WORKFLOW.fullmatch(workflow):
        raise ConfigError(
            f"--workflow must be OWNER/REPOSITORY@REF, where REF is a branch, a tag or a commit, not {workflow!r}. "
            "Leave it out for a self-contained workflow."
        )


def write_plugin(name: str, folder: Path, workflow: str | None = None, *, graph: bool = False) -> list[Path]:
    """Writes the package.

    Args:
        name: The platform's name, checked.
        folder: Created if missing; must be empty.
        workflow: OWNER/REPOSITORY@REF of a shared workflow, checked; None for a self-contained one.
        graph: Whether the platform has a graph compiler instead of torch kernels.

    Returns:
        The files written.

    Raises:
        ConfigError: The folder is not empty, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; nothing was written. Pass another with --dir.")
    package = f"mvllm_{name.replace('-', '_')}"
    words = {
        "@name@": name,
        "@Name@": "".join(word.capitalize() for word in name.split("-")),
        "@package@": package,
        "@core_version@": (version := ".".join(__version__.split(".")[:2])),
        "@graph_requirement@": f'"mvllm-graph>={version},<1", ' if graph else "",
        "@contract@": ", ".join(map(str, CONTRACT)),
    }
    files = dict(GRAPH_FILES if graph else FILES)
    if workflow is not None:
        files[WORKFLOW_FILE] = SHARED_WORKFLOW
        words["@workflow_repository@"], _, words["@workflow_ref@"] = workflow.partition("@")
    template = importlib.resources.files("mvllm_conformance") / "plugin_template"
    written = []
    for target, source in files.items():
        text = (template / source).read_text(encoding="utf-8") if source else ""
        for word, value in words.items():
            text = text.replace(word, value)
        path = folder / target.replace("@package@", package)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as e:
            raise ConfigError(f"{path} cannot be written: {e.strerror or e}.") from e
        written.append(path)
    return written


WORKFLOW_FILE = ".github/workflows/conformance.yml"
SHARED_WORKFLOW = "conformance-shared.yml.tmpl"
"""The template of WORKFLOW_FILE that calls a shared workflow."""

FILES = {
    "pyproject.toml": "pyproject.toml.tmpl",
    "README.md": "README.md.tmpl",
    "waivers.toml": "waivers.toml.tmpl",
    ".gitignore": "gitignore.tmpl",
    WORKFLOW_FILE: "conformance.yml.tmpl",
    "src/@package@/__init__.py": "init.py.tmpl",
    "src/@package@/py.typed": "",
    "src/@package@/plugin.py": "plugin.py.tmpl",
    "src/@package@/probe.py": "probe.py.tmpl",
    "src/@package@/platform.py": "platform.py.tmpl",
    "src/@package@/runtime.py": "runtime.py.tmpl",
    "src/@package@/attention.py": "attention.py.tmpl",
    "src/@package@/ops.py": "ops.py.tmpl",
    "tests/conftest.py": "conftest.py.tmpl",
    "tests/test_conformance.py": "test_conformance.py.tmpl",
}
"""Files of a plugin and their templates; an empty name makes an empty file."""

_TORCH_ONLY = frozenset({"src/@package@/runtime.py", "src/@package@/attention.py", "src/@package@/ops.py"})

GRAPH_FILES = {
    **{target: source for target, source in FILES.items() if target not in _TORCH_ONLY},
    "README.md": "graph_README.md.tmpl",
    "src/@package@/platform.py": "graph_platform.py.tmpl",
    "src/@package@/compiler.py": "graph_compiler.py.tmpl",
}
"""Files of a plugin with a graph compiler, likewise."""
