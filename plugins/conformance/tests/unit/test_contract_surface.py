"""Tests that each change of the plugin contract (`mvllm.plugin_api`) is recorded and bumps its version correctly.

`contracts/current.json` is the contract in the source. A commit that changes the contract regenerates this file, so
that reviewers see the change. `contracts/released-MAJOR.MINOR.json` is the contract of a release: a copy of
`current.json`, made when that version is published. The required version is computed from the newest release.

The part of graphs has its own files and tests: plugins/graph/tests/unit/test_contract.py.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import re
import sys
from pathlib import Path

import pytest

from mvllm import extension_api, plugin_api
from mvllm.entrypoints.cli.main import main
from mvllm.platform.hookspecs import mvllm_platform
from mvllm_conformance import contract_surface
from mvllm_conformance.contract_changes import changes, needed_version
from mvllm_conformance.contract_surface import (
    GraphContractOperation,
    Member,
    Name,
    as_data,
    as_text,
    from_data,
    read_surface,
)

FOLDER = Path(__file__).parent / "contracts"
CURRENT = FOLDER / "current.json"
WRITE_COMMAND = "python -m plugins.conformance.tests.unit.test_contract_surface"
SURFACE = read_surface(with_graphs=False)


def exported(name):
    """The object that plugins import by `name`."""
    return getattr(plugin_api, name)


def defining_module(name):
    """The name of the module that defines `name`."""
    exported(name)
    [found] = {
        node.module
        for node in ast.walk(ast.parse(inspect.getsource(plugin_api)))
        if isinstance(node, ast.ImportFrom)
        and node.module.startswith("mvllm.")
        and name in [alias.name for alias in node.names]
    }
    return found


def load_contract(path):
    return from_data(json.loads(path.read_text("utf-8")))


def newest_release(folder=FOLDER):
    released = [load_contract(path) for path in folder.glob("released-*.json")]
    return max(released, key=lambda surface: surface.contract, default=None)


def unrecorded_changes_message(recorded, surface):
    """The failure message that lists the changes missing in the recorded contract; empty if there are none."""
    found = changes(recorded, surface)
    if not found and recorded.contract == surface.contract:
        return ""
    listing = "\n".join(f"  {change}" for change in found) or "  its version"
    return f"The contract has changed:\n{listing}\nIf the change is intended, run: {WRITE_COMMAND}"


def wrong_version_message(released, surface):
    """The failure message for a version that does not match the changes since the release; empty if it does."""
    if released is None:
        return "" if surface.contract == (1, 0) else "Nothing has been released: the contract's version stays 1.0."
    found = changes(released, surface)
    needed = needed_version(released.contract, found)
    if surface.contract == needed or (not found and surface.contract == released.contract):
        return ""
    listing = "\n".join(f"  {change}" for change in found) or "  nothing"
    return (
        f"Since contract {released.contract[0]}.{released.contract[1]} was released, this has changed:\n{listing}\n"
        f"That needs CONTRACT = {needed} in mvllm/platform/spec.py; it is {surface.contract}."
    )


def test_the_recorded_contract_is_current():
    message = unrecorded_changes_message(load_contract(CURRENT), SURFACE)
    assert not message, message


def test_the_version_matches_the_changes_since_the_last_release():
    message = wrong_version_message(newest_release(), SURFACE)
    assert not message, message


# ------------------------------------------------------------------------------------------------- what is a change


@pytest.fixture
def new():
    """A copy of the contract for a test to change."""
    return copy.deepcopy(SURFACE)


def diff(new):
    return [str(change) for change in changes(SURFACE, new)]


def test_equal_contracts_have_no_changes(new):
    assert diff(new) == []


def test_an_added_name_is_minor_and_a_removed_name_is_major(new):
    new.names["Profiler"] = Name("class")
    del new.names["OpCase"]
    assert diff(new) == ["major: OpCase was removed", "minor: Profiler was added"]


def test_an_optional_method_is_minor_and_a_required_one_major(new):
    new.names["Platform"].members["sleep"] = Member("method")
    new.names["Platform"].members["wake"] = Member("method", required=True)
    assert diff(new) == ["minor: Platform.sleep was added", "major: Platform.wake was added, and is required"]


def test_a_method_that_becomes_optional_is_minor_and_one_that_becomes_required_major(new):
    new.names["Platform"].members["topology"].required = False
    new.names["Platform"].members["ops"].required = True
    assert diff(new) == ["minor: Platform.topology is no longer required", "major: Platform.ops is now required"]


def test_a_renamed_method_is_one_removed_and_one_added(new):
    members = new.names["Communicator"].members
    members["all_sum"] = members.pop("all_reduce")
    assert "major: Communicator.all_reduce was removed" in diff(new)


def test_a_field_with_a_default_at_the_end_is_minor(new):
    new.names["Capabilities"].members["sparse"] = Member("field", [], "bool", "False")
    assert diff(new) == ["minor: Capabilities.sparse was added"]


def test_a_field_without_a_default_is_major(new):
    new.names["MemoryInfo"].members["shared"] = Member("field", [], "int", required=True)
    assert diff(new) == ["major: MemoryInfo.shared was added, and is required"]


def test_a_field_before_others_is_major_because_it_takes_their_position(new):
    entry = new.names["ProbeResult"]
    entry.members = {"since": Member("field", [], "str", "''"), **entry.members}
    assert "major: ProbeResult: since is at the position of available; new fields come last" in diff(new)


@pytest.mark.parametrize("what", ["type", "default", "phase"])
def test_a_changed_type_default_or_phase_is_major(new, what):
    member = new.names["Capabilities"].members["fork_safe"]
    before = getattr(member, what)
    setattr(member, what, "str")
    assert diff(new) == [f"major: Capabilities.fork_safe: its {what} was {before or 'none'}, is str"]


def test_a_default_for_a_required_field_is_minor(new):
    member = new.names["ProbeResult"].members["reason"]
    member.default, member.required = "''", False
    assert diff(new) == ["minor: ProbeResult.reason is no longer required"]


def test_an_added_parameter_is_major_for_methods_that_plugins_implement(new):
    new.names["Platform"].members["plan"].parameters.append("strict: bool = False")
    [change] = diff(new)
    assert change.startswith("major: Platform.plan: its parameters were (config: EngineConfig), are (config: Engine")


def test_an_added_parameter_with_a_default_is_minor_for_methods_that_plugins_call(new):
    parameters = new.names["TorchCommunicator"].members["__init__"].parameters
    parameters.append("port: int = 0")
    assert diff(new)[0].startswith("minor: TorchCommunicator.__init__: its parameters were")
    parameters[-1] = "port: int"
    assert diff(new)[0].startswith("major: TorchCommunicator.__init__: its parameters were")


def test_the_order_of_keyword_only_fields_is_ignored(new):
    assert SURFACE.names["SamplingParams"].keyword_only
    entry = new.names["SamplingParams"]
    entry.members = {"since": Member("field", [], "str", "''"), **entry.members}
    assert diff(new) == ["minor: SamplingParams.since was added"]


def test_fields_that_become_keyword_only_are_major(new):
    new.names["ProbeResult"].keyword_only = True
    assert diff(new) == ["major: ProbeResult: its fields are given by keyword now"]


def test_a_changed_base_group_or_hook_is_major(new):
    new.names["ContractError"].bases = ["Exception"]
    new.entry_points = "mvllm.devices"
    new.hooks["mvllm_platform"].parameters = ["core: str"]
    assert diff(new) == [
        "major: the entry points' group was mvllm.platforms, is mvllm.devices",
        "major: hook mvllm_platform: its parameters were (), are (core: str)",
        "major: ContractError: its bases was PlatformError, is Exception",
    ]


# --------------------------------------------------------------------------------------------------- which version


def test_an_unrecorded_change_is_reported_with_the_command(new):
    new.names["Profiler"] = Name("class")
    message = unrecorded_changes_message(SURFACE, new)
    assert "minor: Profiler was added" in message and message.endswith(f"run: {WRITE_COMMAND}")


def test_before_the_first_release_changes_keep_the_version_1_0(new):
    del new.names["OpCase"]
    new.contract = (1, 0)
    assert wrong_version_message(None, new) == ""
    new.contract = (1, 1)
    assert "stays 1.0" in wrong_version_message(None, new)


@pytest.mark.parametrize(
    ("change", "version", "enough"),
    [
        ("none", (1, 0), True),
        ("addition", (1, 0), False),
        ("addition", (1, 1), True),
        ("addition", (1, 2), False),
        ("removal", (1, 1), False),
        ("removal", (2, 0), True),
    ],
)
def test_after_a_release_the_changes_determine_the_version(new, change, version, enough):
    if change == "addition":
        new.names["Profiler"] = Name("class")
    if change == "removal":
        del new.names["OpCase"]
    new.contract = version
    released = copy.deepcopy(SURFACE)
    released.contract = (1, 0)
    message = wrong_version_message(released, new)
    assert (message == "") == enough
    if not enough:
        assert "needs CONTRACT = " + ("(2, 0)" if change == "removal" else "(1, 1)") in message


def test_releases_are_ordered_by_version_number(tmp_path, new):
    for version in ((1, 9), (1, 10), (1, 2)):
        new.contract = version
        (tmp_path / f"released-{version[0]}.{version[1]}.json").write_text(json.dumps(as_data(new)))
    assert newest_release(tmp_path).contract == (1, 10)


# ---------------------------------------------------------------------------------------- the surface, and the command


def test_the_surface_matches_runtime_introspection():
    assert set(SURFACE.names) == set(plugin_api.__all__)
    for name, entry in SURFACE.names.items():
        assert_matches_introspection(name, entry, exported(name))


def assert_matches_introspection(name, entry, actual):
    """Compares an entry of the surface, parsed from source without running it, with the imported class."""
    if not isinstance(actual, type):
        return
    assert [base.__name__ for base in actual.__bases__ if base is not object] == [
        base.rpartition(".")[2] for base in entry.bases
    ]
    public = {member for member in vars(actual) if not member.startswith("_")} | set(
        vars(actual).get("__annotations__", {})
    )
    assert {member for member in public if not member.startswith("_")} == set(entry.members) - {"__init__"}, name
    methods = {member for member, facts in entry.members.items() if facts.kind in ("method", "property")}
    if entry.bases == ["ABC"]:
        required = {member for member in methods if entry.members[member].required}
        assert required | {"validate"} == set(actual.__abstractmethods__) | {"validate"}, name
    for member in methods - {"__init__"}:
        function = getattr(actual, member)
        function = function.fget if isinstance(function, property) else function
        parameters = [
            re.sub(r"<class (\w+)>", r"\1", str(p).replace("'", ""))
            for p in inspect.signature(function).parameters.values()
        ][1:]
        constants = vars(sys.modules[actual.__module__])
        shown = [
            re.sub(r"= (_\w+)$", lambda found: f"= {constants[found[1]]}", p.replace("'", ""))  # noqa: B023
            for p in entry.members[member].parameters
            if p != "*"
        ]
        assert [p.replace(" ", "") for p in shown] == [p.replace(" ", "") for p in parameters], (name, member)


@pytest.mark.parametrize("module", [plugin_api, extension_api])
def test_help_lists_every_name(module):
    """pydoc and tab completion read `dir`, which must have the names that are resolved on first use."""
    assert set(module.__all__) <= set(dir(module))


OPAQUE_TO_PLUGINS = {"Cache", "ReferenceMetadata"}
"""Types that plugins receive from `ReferenceAttention` and only pass back to it."""


def test_every_mvllm_type_in_a_signature_is_exported_by_plugin_api():
    missing = {}
    for name, entry in SURFACE.names.items():
        texts = [
            *entry.bases,
            *(p for f in (entry.itself, *entry.members.values()) if f for p in [*f.parameters, f.type]),
        ]
        words = set(re.findall(r"\b[A-Z]\w+", re.sub(r"'[^']*'", "", " ".join(texts))))
        source = inspect.getsource(sys.modules[defining_module(name)])
        for word in words - set(SURFACE.names) - OPAQUE_TO_PLUGINS:
            # An mvllm type is defined in the module or imported from mvllm.
            if re.search(rf"^(class )?{word}\b *[(:=]|^from mvllm[^(\n]*(\([^)]*)?\b{word}\b", source, re.MULTILINE):
                missing.setdefault(word, name)
    assert not missing, f"types used in plugin signatures must be exported by plugin_api; missing: {missing}"


@pytest.mark.parametrize("method", ["sleep", "wake_up", "add_lora", "remove_lora", "group_layers", "collect_output"])
def test_optional_worker_methods_are_not_required(method):
    assert not SURFACE.names["WorkerProtocol"].members[method].required


def test_every_method_that_plugins_implement_has_a_phase():
    bare = [
        f"{name}.{member}"
        for name, entry in SURFACE.names.items()
        for member, facts in entry.members.items()
        if entry.written_by_plugins and facts.kind in ("method", "classmethod", "property") and not facts.phase
    ]
    assert not bare
    phases = {p.value for p in plugin_api.Phase} | {"any"}
    platform = SURFACE.names["Platform"].members.values()
    assert {word for facts in platform for word in facts.phase.split(" or ")} <= phases
    assert SURFACE.names["Platform"].members["init_device"].phase == "worker"


def test_the_hook_is_part_of_the_contract():
    assert list(SURFACE.hooks) == [mvllm_platform.__name__]


def test_the_contract_survives_a_json_round_trip():
    assert from_data(json.loads(json.dumps(as_data(SURFACE)))) == SURFACE


def test_the_command_prints_every_name_with_its_signature(capsys):
    assert main(["contract"]) == 0
    out = capsys.readouterr().out
    assert out == as_text(read_surface()) + "\n"
    for line in (
        f"contract {plugin_api.CONTRACT[0]}.{plugin_api.CONTRACT[1]}",
        "    required method plan(config: EngineConfig) -> Plan | Refusals  # frontend",
        "    method ops() -> Sequence[OpProvider]  # worker",
        "    field prefix_caching: bool = False",
        "function require_phase(*allowed: Phase) -> None",
    ):
        assert line in out.splitlines()
    assert all(f" {name}" in out for name in plugin_api.__all__)


def test_the_command_compares_with_an_older_contract(capsys, tmp_path):
    new, kept = read_surface(), tmp_path / "kept.json"
    assert main(["contract", "--json"]) == 0
    kept.write_text(capsys.readouterr().out)
    assert main(["contract", "--against", str(kept)]) == 0
    assert capsys.readouterr().out == "nothing changed\n"
    new.names["Capabilities"].members["warp"] = Member("field", [], "bool", "False")
    kept.write_text(json.dumps(as_data(new)))
    assert main(["contract", "--against", str(kept), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report == {"compatible": False, "changes": [{"step": "major", "text": "Capabilities.warp was removed"}]}
    kept.write_text("[]")
    assert main(["contract", "--against", str(kept)]) == 1
    assert "mvllm contract --json" in capsys.readouterr().err


def test_a_contract_file_with_graphs_names_their_package_if_it_is_missing(capsys, tmp_path, monkeypatch, new):
    monkeypatch.setattr(contract_surface, "GRAPH_API", "mvllm_graph_that_is_not_there")
    new.graph_operations["neg"] = GraphContractOperation("array", "refused")
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(as_data(new)))
    assert main(["contract"]) == 0
    assert main(["contract", "--against", str(kept)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert str(kept) in line and "mvllm-graph" in line


if __name__ == "__main__":
    CURRENT.write_text(json.dumps(as_data(SURFACE), indent=1) + "\n", encoding="utf-8")
