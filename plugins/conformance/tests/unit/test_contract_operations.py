"""The operations of the contract equal the schemas of the implementation."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import subprocess
import sys

from plugins.conformance.tests import operations_page

from mvllm.entrypoints.cli.main import PART_COMMANDS, command_summary, installed_commands, main
from mvllm.installation import install_command
from mvllm.ops.all_schemas import SCHEMAS
from mvllm_conformance.contract_changes import changes
from mvllm_conformance.contract_surface import as_text, read_surface
from tests.unit.entrypoints.test_command_line import check_light_help

SURFACE = read_surface()
OPERATIONS = SURFACE.operations
DTYPES = ("compute dtype", "float32", "int64", "int32", "likewise")


def test_the_operations_equal_the_schemas():
    assert set(OPERATIONS) == set(SCHEMAS)
    for name, schema in SCHEMAS.items():
        read = OPERATIONS[name]
        assert read.facts == dict(schema.facts)
        assert read.may_overwrite == list(schema.may_overwrite)
        assert read.updates == list(schema.updates)
        assert read.replaces_others == schema.replaces_others
        assert read.summary == schema.summary
        signature = inspect.signature(schema.reference)
        assert read.signature("f").replace("'", "") == f"f{signature}".replace("'", "")


def test_every_tensor_has_its_shape_and_dtype():
    bare = []
    for name, operation in OPERATIONS.items():
        kinds = dict(parameter.split(": ", 1) for parameter in operation.parameters)
        described = operation.shapes or dict.fromkeys([*kinds, "returns"], operation.summary)
        assert [*described] == [*kinds, "returns"], name
        bare += [
            f"{name}({key}): {described[key]}"
            for key, kind in kinds.items()
            if "torch.Tensor" in kind and not ("[" in described[key] and any(d in described[key] for d in DTYPES))
        ]
    assert not bare


def test_the_commands_print_signature_shapes_and_facts(capsys):
    assert main(["ops", "--platform", "cpu", "linear", "rms_norm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "operation linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor",
        "    bias: [out_features] or None, compute dtype.",
        "    fact in_features: columns of the weight on this rank",
    ):
        assert line in lines and line in as_text(SURFACE).splitlines()
    assert not any("quick_gelu" in line for line in lines)
    assert any(line.startswith("rms_norm") and "reference" in line for line in lines)
    assert main(["ops", "--platform", "cpu", "convolution"]) == 1
    assert "Unknown operation 'convolution'" in capsys.readouterr().err


def test_the_commands_import_no_torch():
    code = (
        "import sys\nfrom mvllm.entrypoints.cli.main import main\n"
        "sys.exit(main(['contract']) or 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    check_light_help(*([command, "--help"] for command in PART_COMMANDS["conformance"]))


def test_every_command_has_a_summary_of_its_own():
    commands = {name: each for name, each in installed_commands().items() if each.distribution == "mvllm-conformance"}
    del commands["conformance"]
    assert {name: command_summary(source) for name, source in commands.items()} == PART_COMMANDS["conformance"]


def test_the_operations_of_graphs_need_their_package(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["ops", "--graph"]) == 1
    wanted = f"needs the package mvllm-graph, which is not installed. Run: {install_command('mvllm-graph')}"
    assert capsys.readouterr().err == f"error: `mvllm ops --graph` {wanted}\n"


def test_a_changed_signature_is_major_and_a_changed_fact_minor():
    new = copy.deepcopy(SURFACE)
    new.operations["linear"].facts["rows"] = "how many"
    new.operations["linear"].summary = "worded anew"
    new.operations["rms_norm"].parameters.append("offset: float = 0.0")
    new.operations["fused_add_rms_norm"].may_overwrite.remove("x")
    del new.operations["argmax"]
    assert [str(change).partition(" was (")[0] for change in changes(SURFACE, new)] == [
        "major: operation argmax was removed",
        "major: operation fused_add_rms_norm: its right to overwrite x was removed",
        "minor: operation linear: its fact rows was added",
        "major: operation rms_norm: its signature",
    ]


def test_the_page_of_operations_is_current():
    message = "run: python -m plugins.conformance.tests.operations_page"
    assert operations_page.PAGE.read_text(encoding="utf-8") == operations_page.page(), message
