"""The guides agree with the code: tables, check ids, attributes, error texts, links and programs."""

from __future__ import annotations

import ast
import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import pytest

import mvllm
from mvllm.engine.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from mvllm.entrypoints.cli import doctor_checks
from mvllm.entrypoints.llm import LLM
from mvllm.platform.discovery import Candidate, PluginFailure
from mvllm.platform.spec import PlatformSpec, ProbeResult
from mvllm.plugin_groups import PluginSource
from tests.unit.docs.every_part import needs_every_part
from tests.unit.docs.guide_tables import DOCS, PAGES, tables, with_table
from tests.unit.entrypoints.builders import save_model_folder

ROOT = DOCS.parent
OFFLINE = (DOCS / "how-to" / "offline-generation.md").read_text(encoding="utf-8")
TROUBLESHOOTING = (DOCS / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_every_part) if name == "commands" else name for name in PAGES]
)
def test_generated_tables_are_up_to_date(name):
    page = PAGES[name].read_text(encoding="utf-8")
    assert with_table(page, name, tables()[name]) == page, "run: python -m tests.unit.docs.guide_tables"


class FailingDoctor:
    """A platform whose own checks fail to run."""

    capabilities = None

    def doctor(self):
        raise OSError("no driver")


def test_the_ids_of_all_checks_are_listed(monkeypatch, tmp_path):
    spec = PlatformSpec("acme", "Acme", (1, 0), "x:y", "there_is_no_such_module:make", torch_floor="2.6")
    source = PluginSource("acme", "acme.plugin", "mvllm-acme", "1.0")
    good = Candidate(source, spec, ProbeResult(True, "1 device"))
    failing = Candidate(source, replace(spec, factory=f"{__name__}:FailingDoctor"), ProbeResult(True, "1 device"))
    bad = Candidate(source, failure=PluginFailure("import", "gone", None, "mend it"))
    hidden = Candidate(source, spec, ProbeResult(False, "no device"))
    monkeypatch.setattr(doctor_checks, "_import_torch", lambda: None)
    monkeypatch.setattr(doctor_checks, "_device_variable", lambda factory: "ACME_DEVICES")
    monkeypatch.setenv("ACME_DEVICES", "")
    found = set()
    for candidate in (good, failing, bad, hidden):
        monkeypatch.setattr(doctor_checks, "discover", lambda only=None, candidate=candidate: [candidate])
        found |= {check.id for check in doctor_checks.run_checks(model=save_model_folder(tmp_path))}
    listed = re.findall(r"^\| `([\w.<>]+)` \|", TROUBLESHOOTING, flags=re.MULTILINE)
    assert {name.replace("<name>", "acme") for name in listed} == found
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("cls", [RequestOutput, CompletionOutput, RequestMetrics, Logprob])
def test_every_attribute_of_an_output_is_named(cls):
    named = set(re.findall(r"`(\w+)`", OFFLINE.partition("## Outputs")[2].partition("\n## ")[0]))
    assert {field.name for field in dataclasses.fields(cls)} <= named


def test_methods_and_arguments_in_the_guide_exist():
    for name in re.findall(r"`llm\.(\w+)\(\)`", OFFLINE):
        assert hasattr(LLM, name)
    [paragraph] = [text for text in OFFLINE.split("\n\n") if text.startswith("`LLMEngine` is")]
    for name in re.findall(r"`(\w+)\(", paragraph):
        assert hasattr(mvllm.LLMEngine, name)


@pytest.fixture(scope="module")
def messages() -> str:
    """Every text in the sources, with those that are split there joined."""
    folders = ("core/mvllm", *(f"platforms/{name}/src" for name in ("cpu", "cuda", "rocm", "torch-gpu")))
    return "\n".join(
        "".join(literal_parts(node))
        for folder in (*folders, "plugins/gguf/src", "plugins/transformers-backend/src")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.JoinedStr | ast.Constant)
    )


def test_every_explained_error_is_in_the_source(messages: str) -> None:
    """Each heading of the last section is part of a message in the source, even if the string is split there."""
    headings = re.findall(r'^### "(.+)"$', TROUBLESHOOTING, flags=re.MULTILINE)
    assert len(headings) > 10
    assert [heading for heading in headings if heading not in messages] == []


def test_the_messages_of_symptoms_are_in_the_source(messages: str) -> None:
    """First cells of the tables have them in code marks, with `...` for what differs."""
    symptoms = TROUBLESHOOTING.partition("\n## ")[2].partition("\n## Doctor")[0]
    cells = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", symptoms, flags=re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell) if " " in text]
    parts = [part.strip(" :,") for text in quoted for part in text.split("...") if part.strip(" :,")]
    assert len(parts) > 25
    assert [part for part in parts if part not in messages and not part.startswith("mvllm ")] == []


def literal_parts(node: ast.AST) -> list[str]:
    if isinstance(node, ast.JoinedStr):
        return [text for part in node.values for text in literal_parts(part)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return []


@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("*.md")) + sorted((DOCS / "how-to").glob("*.md")))
def test_python_blocks_are_python(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE):
        compile(block, str(page), "exec")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub generates for the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_are_valid():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            target, _, anchor = link.partition("#")
            if not target.startswith("http"):
                path = page.parent / target if target else page
                assert path.exists(), f"{page}: {link}"
                assert not anchor or anchor in anchors(path), f"{page}: {link}"


def test_every_page_is_in_the_index():
    index = (DOCS / "README.md").read_text("utf-8")
    linked = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", index)}
    pages = {
        path for folder in ("tutorials", "how-to", "reference", "explanation") for path in (DOCS / folder).glob("*.md")
    }
    assert {str(page) for page in pages if page.resolve() not in linked} == set()


def test_pages_do_not_mention_removed_files():
    for folder in ("core/mvllm", "platforms/cpu", "plugins", "tests", "ci", "docs"):
        assert (ROOT / folder).is_dir()
        assert f"`{folder}/`" in Path(ROOT / "docs" / "architecture.md").read_text("utf-8")
