"""The clauses, docs/reference/contract.md and the suite agree."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import mvllm_conformance
from mvllm.plugin_api import CONTRACT, Capabilities
from mvllm_conformance.clauses import CLAUSES, FAMILIES, claims

PAGE = re.sub(  # with list items on one line each
    r"\n  (?=\S)", " ", (Path(__file__).parents[4] / "docs" / "reference" / "contract.md").read_text(encoding="utf-8")
)
SUITE = Path(mvllm_conformance.__file__).parent / "suite"

# Core never requests these of a platform, so there is nothing to reject.
NEVER_ASKED = {
    *("ATT-11", "SHP-03"),  # they describe how results are computed
    *("COM-05", "COM-06", "COM-08", "COM-09", "COM-10"),  # no layer uses these yet
    *("GRF-01", "GRF-02"),  # without graphs core marks no step, which tests of SHP-04 see
    *(f"GRA-{number:02}" for number in range(1, 8)),  # without a graph compiler models run as torch operations
}


def marks() -> list[tuple[str, list[str], dict[str, object]]]:
    """(test, clauses, keywords) of every test of the suite, read from the source."""
    found = []
    for file in SUITE.glob("test_*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            [mark] = [
                d
                for d in node.decorator_list
                if isinstance(d, ast.Call) and isinstance(d.func, ast.Name) and d.func.id == "clause"
            ]
            ids = [ast.literal_eval(argument) for argument in mark.args]
            found.append((node.name, ids, {str(k.arg): ast.literal_eval(k.value) for k in mark.keywords}))
    return found


def test_the_page_and_the_registry_have_the_same_clauses() -> None:
    on_page = dict(re.findall(r"^- ([A-Z0-9]{3}-\d\d) (.*)$", PAGE, flags=re.MULTILINE))
    assert on_page == {clause.id: clause.sentence for clause in CLAUSES.values()}
    assert list(dict.fromkeys(name[:3] for name in on_page)) == list(FAMILIES)
    headings = re.findall(r"^\*\*(.+)\*\*$", PAGE.partition("## Clauses")[2], flags=re.MULTILINE)
    assert headings == list(FAMILIES.values())


def test_every_clause_has_a_test_and_every_test_a_clause() -> None:
    tested = {clause for _, ids, keywords in marks() if not keywords.get("refusal") for clause in ids}
    assert tested == set(CLAUSES)


def test_every_optional_capability_has_a_refusal_test() -> None:
    refused = {clause for _, ids, keywords in marks() if keywords.get("refusal") for clause in ids}
    conditional = {c.id for c in CLAUSES.values() if c.needs not in (None, "torch_device")}
    assert conditional - NEVER_ASKED <= refused


def test_clauses_are_not_newer_than_the_contract_and_need_known_capabilities() -> None:
    nothing = Capabilities(dtypes=("float32",), kv_dtypes=("float32",))
    for clause in CLAUSES.values():
        assert clause.since <= CONTRACT
        assert claims(nothing, clause.needs) is (clause.needs in (None, "torch_device"))


def test_without_torch_device_capabilities_of_cores_worker_are_not_claimed() -> None:
    opaque = Capabilities(dtypes=("float32",), kv_dtypes=("float32",), torch_device=False, soft_cap=True, graphs=True)
    assert not claims(opaque, "soft_cap") and not claims(opaque, "graphs")
    everything_of_torch = Capabilities(
        dtypes=("float32",), kv_dtypes=(), collectives=frozenset({"barrier"}), graphs=True
    )
    assert claims(everything_of_torch, "graphs")
    assert claims(everything_of_torch, "collectives:barrier") and not claims(everything_of_torch, "collectives:gather")


def test_one_file_can_import_all_tests() -> None:
    names = [name for name, _, _ in marks()]
    assert len(set(names)) == len(names), "two tests of one name: one would hide the other"
    code = "import json\nfrom mvllm.testing.suite import everything as e\nprint(json.dumps([e.__all__, e.FILES]))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    exported, files = json.loads(printed)
    assert set(names) <= set(exported)
    assert {path.stem for path in SUITE.glob("test_*.py")} == set(files)
