"""`mvllm plugin new`: a platform plugin that works at once, to be replaced piece by piece.

The template is the folder `mvllm/entrypoints/plugin_template`: files with a few `@words@` to fill in. It lies in the
wheel, so that whoever has mvllm installed needs nothing else, and there is no second copy of it.
"""

from __future__ import annotations

import argparse
import importlib.resources
import re
from pathlib import Path

from mvllm.errors import ConfigError
from mvllm.platform.discovery import find_sources
from mvllm.platform.installable import installable_executors, installable_platforms
from mvllm.platform.spec import CONTRACT
from mvllm.version import __version__

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
LONGEST_NAME = 40
WORKFLOW = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*/[\w.-]+@[\w./-]+")
RESERVED = frozenset({"all", "any", "api", "auto", "core", "demo", "default", "mvllm", "none", "plugin", "testing"})
"""Words that mean something else where a platform's name may stand, or beside it in a package's name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="new")
    new = actions.add_parser(
        "new",
        help="write a platform plugin to start from",
        description="Writes the package mvllm-NAME: a platform that works at once, with the host standing in for the "
        "device, and passes the conformance suite. Replace it piece by piece.",
        allow_abbrev=False,
    )
    new.add_argument("name", metavar="NAME", help="The platform's name: what users type after --platform.")
    new.add_argument("--dir", metavar="PATH", type=Path, help="Folder to write. Default: mvllm-NAME, here.")
    new.add_argument(
        "--workflow",
        metavar="OWNER/REPOSITORY@REF",
        help="A repository of mvllm on GitHub whose conformance workflow yours is to call, at a branch, tag or commit "
        "of it. Default: a workflow that stands on its own.",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the package and says what to do next."""
    check_name(args.name)
    if args.workflow is not None:
        check_workflow(args.workflow)
    folder = args.dir if args.dir is not None else Path(f"mvllm-{args.name}")
    written = write_plugin(args.name, folder, args.workflow)
    print(f"Wrote {len(written)} files of mvllm-{args.name} to {folder}. Next:\n")
    print(f"  pip install -e {folder}")
    print("  mvllm platforms")
    print(f'  mvllm generate --platform {args.name} --model demo --prompt "Once upon a time"')
    print(f"  mvllm conformance --platform {args.name}\n")
    print(f"Then replace it piece by piece: {folder / 'README.md'} says in which order.")
    return 0


def check_name(name: str) -> None:
    """Refuses a name that could not be installed, typed or told apart.

    Raises:
        ConfigError: Says why not, and which name would do where there is one near.
    """
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:LONGEST_NAME].strip("-")
        hint = f" {near!r} would do." if NAME.fullmatch(near) else ""
        raise ConfigError(
            f"{name!r} cannot be a platform's name: lower-case letters and digits, beginning with a letter, in words "
            f"joined by single dashes, at most {LONGEST_NAME} characters.{hint}"
        )
    if name.startswith("mvllm-"):
        raise ConfigError(f"Leave out 'mvllm-': the package of a platform acme is called mvllm-acme. Found {name!r}.")
    ours = {package.removeprefix("mvllm-") for package in installable_platforms()}
    if name in RESERVED | ours | installable_executors().keys():
        raise ConfigError(f"The name {name!r} is reserved. Choose another, for instance the name of your hardware.")
    owner = next((source for source in find_sources() if source.name == name), None)
    if owner is not None:
        raise ConfigError(
            f"A platform {name!r} is already installed: {owner}. Two of one name cannot be told apart. Choose another "
            f"name, or run: pip uninstall {owner.distribution}"
        )


def check_workflow(workflow: str) -> None:
    """Refuses what GitHub would not take for a repository at a place in its history.

    Raises:
        ConfigError: Says what is expected.
    """
    if not WORKFLOW.fullmatch(workflow):
        raise ConfigError(
            f"--workflow wants OWNER/REPOSITORY@REF, where REF is a branch, a tag or a commit; found {workflow!r}. "
            "Leave it out for a workflow that needs nobody's repository."
        )


def write_plugin(name: str, folder: Path, workflow: str | None = None) -> list[Path]:
    """Writes the package.

    Args:
        name: The platform's name, checked.
        folder: Created; may exist if it is empty.
        workflow: OWNER/REPOSITORY@REF of the workflow that the package's calls, checked; None for one of its own.

    Returns:
        The files written.

    Raises:
        ConfigError: The folder holds something, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; nothing was written. Pass another with --dir.")
    package = f"mvllm_{name.replace('-', '_')}"
    words = {
        "@name@": name,
        "@Name@": "".join(word.capitalize() for word in name.split("-")),
        "@package@": package,
        "@core_version@": ".".join(__version__.split(".")[:2]),
        "@contract@": ", ".join(map(str, CONTRACT)),
    }
    files = dict(FILES)
    if workflow is not None:
        files[WORKFLOW_FILE] = SHARED_WORKFLOW
        words["@workflow_repository@"], _, words["@workflow_ref@"] = workflow.partition("@")
    template = importlib.resources.files("mvllm.entrypoints") / "plugin_template"
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
"""What stands there instead where a repository's workflow is to be called."""

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
"""Where each file of the template goes."""
