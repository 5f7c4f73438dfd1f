#!/usr/bin/env python3
"""Counts each plugin's lines and its dependencies on the engine, for docs/explanation/porting-cost.md.

The porting cost of a plugin is not its kernels, which every engine needs, but its dependencies on the engine: imported
names, subclassed classes, patched attributes. The script reads them from the syntax trees and imports no plugin.

    python3 ci/plugin_figures.py            prints the tables
    python3 ci/plugin_figures.py --write    writes them into the page
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "porting-cost.md"
ENGINE, TORCH = "mvllm", "torch"
PUBLISHED_AS = {"mvllm_graph": "mvllm.plugin_api.graph"}
"""Packages that have a part of the engine's interface, and its name there."""
NATIVE = frozenset({".c", ".cc", ".cpp", ".cu", ".h", ".hpp"})

# Plugins of vLLM (0.33, 2026), from their sources: lines of Python; of platform.py; of their own model runner; imported
# symbols and modules of the engine; subclassed classes; patched attributes.
PUBLISHED = (
    ("vllm-ascend", "143 560", "1 465", "5 006", "623 / 266", "146", "153 (and 58 of torch)"),
    ("vllm-gaudi", "39 694", "553", "7 810", "513 / 225", "93", "99 (and 10 of torch)"),
    ("tpu-inference", "144 700", "558", "3 252", "299 / 143", "71", "40 (and 7 of torch)"),
    ("vllm-rbln", "36 031", "469", "5 402", "350 / 153", "38", "50 (and 4 of torch)"),
    ("vllm-metal", "28 820", "1 022", "2 887", "78 / 47", "7", "10"),
    ("vllm-spyre", "7 806", "740", "1 659", "70 / 34", "6", "2 (and 5 of torch)"),
    ("vllm_spyre_next", "about 1 800", "one file", "small", "22 / 16", "9", "0"),
    ("vllm-plugin-FL", "7 592", "209", "4 865", "190 / 83", "14", "about 0"),
)

SHARED = (ROOT / "platforms" / "torch-gpu",)  # code that several plugins share

OURS = ("plugin", "lines of Python", "of C++", "platform.py", "own model runner")
THEIRS = ("plugin", "lines of Python", "platform.py", "own model runner")
HOLD = ("symbols / modules imported", "classes subclassed", "attributes patched")


@dataclass
class Figures:
    """The counts of one plugin.

    Attributes:
        python, native, platform, runner: Lines of all Python and native code, of platform.py, and of model runners
            (classes that run steps).
        symbols: `module.name` of all used names of the engine.
        modules: Modules of the engine that it imports.
        subclassed: Names in `symbols` that are base classes of its classes.
        patched: `owner.attribute` of the engine that it assigns or deletes.
        torch_patched: `owner.attribute` of torch that it assigns or deletes.
    """

    python: int = 0
    native: int = 0
    platform: int = 0
    runner: int = 0
    symbols: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    subclassed: set[str] = field(default_factory=set)
    patched: set[str] = field(default_factory=set)
    torch_patched: set[str] = field(default_factory=set)


def count(plugin: Path) -> Figures:
    """The counts of a plugin's folder: Python files in `src`, native sources outside of tests and builds."""
    figures = Figures()
    for file in sorted((plugin / "src").rglob("*.py")):
        source = file.read_text("utf-8")
        lines = len(source.splitlines())
        figures.python += lines
        if file.name == "platform.py":
            figures.platform += lines
        read(ast.parse(source), figures)
    for file in sorted(plugin.rglob("*")):
        if file.suffix in NATIVE and not {"tests", "build", "dist"} & set(file.relative_to(plugin).parts):
            figures.native += len(file.read_text("utf-8").splitlines())
    return figures


def read(tree: ast.Module, figures: Figures) -> None:
    """Adds the dependencies of one module."""
    bound = {name: published_name(full) for name, full in imports(tree)}
    for full in bound.values():
        if belongs(full, ENGINE):
            module, _, name = full.rpartition(".")
            # `from mvllm import plugin_api` binds a module; its names are counted at their uses.
            if name[:1].isupper() or module.count("."):
                figures.symbols.add(full)
                figures.modules.add(module)
            else:
                figures.modules.add(full)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            full = resolved(node, bound)
            if belongs(full, ENGINE) and full.rpartition(".")[0] in figures.modules - figures.symbols:
                figures.symbols.add(full)
        if isinstance(node, ast.ClassDef):
            bases = {resolved(base, bound) for base in node.bases}
            figures.subclassed |= {base for base in bases if belongs(base, ENGINE)}
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            if {"execute_model", "load_model"} <= methods:
                figures.runner += (node.end_lineno or node.lineno) - node.lineno + 1
    for target in patches(tree, bound):
        if belongs(target, ENGINE):
            figures.patched.add(target)
        if belongs(target, TORCH):
            figures.torch_patched.add(target)


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each name that an import binds, and its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def patches(tree: ast.Module, bound: dict[str, str]) -> Iterator[str]:
    """Full names of assigned or deleted attributes of other modules."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        match node:
            case ast.Assign(targets=several) | ast.Delete(targets=several):
                targets = several
            case ast.AugAssign(target=one) | ast.AnnAssign(target=one):
                targets = [one]
            case ast.Call(func=func, args=[owner, name, *_]) if dotted(func) in ("setattr", "delattr"):
                text = name.value if isinstance(name, ast.Constant) else "*"
                yield f"{resolved(owner, bound)}.{text}"
            case _:
                pass
        for target in flattened(targets):
            if isinstance(target, ast.Subscript) and dotted(target.value) == "sys.modules":
                if isinstance(target.slice, ast.Constant):
                    yield str(target.slice.value)
            elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Attribute):
                yield resolved(target.value, bound)
            elif isinstance(target, ast.Attribute):
                yield resolved(target, bound)


def flattened(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from flattened(target.elts)
        else:
            yield target


def resolved(node: ast.expr, bound: dict[str, str]) -> str:
    """The full name of an expression: `api.Platform` -> `mvllm.plugin_api.Platform`; empty if not imported."""
    head, dot, rest = dotted(node).partition(".")
    return f"{bound[head]}{dot}{rest}" if head in bound else ""


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def published_name(full: str) -> str:
    """A name of a package in PUBLISHED_AS as the engine's."""
    head, dot, rest = full.partition(".")
    return PUBLISHED_AS.get(head, head) + dot + rest


def belongs(full: str, package: str) -> bool:
    return full == package or full.startswith(f"{package}.")


# --- the page


def plugins() -> list[Path]:
    """Folders with platform plugins, and SHARED; platforms/ first."""
    found = [*sorted(ROOT.glob("platforms/*")), *sorted(ROOT.glob("plugins/*"))]
    return [folder for folder in found if folder in SHARED or declares_platform(folder / "pyproject.toml")]


def declares_platform(project: Path) -> bool:
    return project.exists() and 'entry-points."mvllm.platforms"' in project.read_text("utf-8")


def tables() -> dict[str, str]:
    """Both tables of the page, by name."""
    rows = []
    for folder in plugins():
        f = count(folder)
        lines = [rounded(n) for n in (f.python, f.native, f.platform, f.runner)]
        patched = f"{len(f.patched)}" + (f" (and {len(f.torch_patched)} of torch)" if f.torch_patched else "")
        name = f"[{folder.relative_to(ROOT)}](../../{folder.relative_to(ROOT)})"
        rows.append((name, *lines, f"{len(f.symbols)} / {len(f.modules)}", str(len(f.subclassed)), patched))
    return {"ours": table((*OURS, *HOLD), rows), "published": table((*THEIRS, *HOLD), PUBLISHED)}


def rounded(lines: int) -> str:
    """A number rounded to two digits, so that small changes do not change the page."""
    if lines == 0:
        return "none"
    size = 10 ** max(0, len(str(lines)) - 2)
    return f"{round(lines / size) * size:,}".replace(",", " ")


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(titles)
    lines = [titles, ["---", *["--:"] * (len(titles) - 1)], *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_tables(page: str) -> str:
    """The page with updated tables."""
    for name, text in tables().items():
        begin, end = f"<!-- table: {name} -->\n", "\n<!-- end of table -->"
        pattern = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
        page, found = pattern.subn(lambda match, text=text: match[1] + text + match[2], page)  # type: ignore[misc]
        assert found == 1, f"the page has no marker for the table {name!r}"
    return page


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
        return 0
    if arguments:
        print(__doc__)
        return 2
    print("\n\n".join(tables().values()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
