"""The contract changes only with a recorded file and a version step that fits the change.

`contracts/current.json` is the contract as it stands in the source: whoever changes it writes that file anew, so that
the change is seen. `contracts/released-MAJOR.MINOR.json` is the contract of a release: a copy of `current.json`, made
when that version is first published. The newest of these is what the version is counted from.
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

from mvllm import plugin_api
from mvllm.entrypoints.cli.main import main
from mvllm.platform.contract_changes import changes, needed_version
from mvllm.platform.contract_surface import Member, Name, as_data, as_text, from_data, read_surface
from mvllm.platform.hookspecs import mvllm_platform

FOLDER = Path(__file__).parent / "contracts"
CURRENT = FOLDER / "current.json"
WRITE = f"mvllm contract --json > {CURRENT.relative_to(Path(__file__).parents[3])}"
SURFACE = read_surface()


def plugin_api_home(name):
    """The module that defines a name of the contract, which is imported by then."""
    getattr(plugin_api, name)
    [found] = [
        node.module
        for node in ast.walk(ast.parse(inspect.getsource(plugin_api)))
        if isinstance(node, ast.ImportFrom)
        and node.module.startswith("mvllm.")
        and name in [alias.name for alias in node.names]
    ]
    return found


def read(path):
    return from_data(json.loads(path.read_text("utf-8")))


def newest_release(folder=FOLDER):
    released = [read(path) for path in folder.glob("released-*.json")]
    return max(released, key=lambda surface: surface.contract, default=None)


def unseen_changes(kept, surface):
    """What a change of the contract that nobody has looked at reads like; empty if there is none."""
    found = changes(kept, surface)
    if not found and kept.contract == surface.contract:
        return ""
    listing = "\n".join(f"  {change}" for change in found) or "  its version"
    return f"The contract has changed:\n{listing}\nIf that is meant, run: {WRITE}"


def missing_step(released, surface):
    """What a version that is too low for what changed since the release reads like; empty if it is high enough."""
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


def test_the_contract_is_the_recorded_one():
    message = unseen_changes(read(CURRENT), SURFACE)
    assert not message, message


def test_the_version_fits_what_has_changed_since_the_last_release():
    message = missing_step(newest_release(), SURFACE)
    assert not message, message


# ------------------------------------------------------------------------------------------------- what is a change


@pytest.fixture
def new():
    """The contract, to be changed by a test."""
    return copy.deepcopy(SURFACE)


def found(new):
    return [str(change) for change in changes(SURFACE, new)]


def test_equal_contracts_have_no_changes(new):
    assert found(new) == []


def test_a_name_may_come_with_a_minor_step_and_goes_with_a_major_one(new):
    new.names["Profiler"] = Name("class")
    del new.names["OpCase"]
    assert found(new) == ["major: OpCase was removed", "minor: Profiler was added"]


def test_an_optional_method_is_minor_and_a_required_one_major(new):
    new.names["Platform"].members["sleep"] = Member("method")
    new.names["Platform"].members["wake"] = Member("method", required=True)
    assert found(new) == ["minor: Platform.sleep was added", "major: Platform.wake was added, and is required"]


def test_a_method_that_becomes_optional_is_minor_and_one_that_becomes_required_major(new):
    new.names["Platform"].members["topology"].required = False
    new.names["Platform"].members["ops"].required = True
    assert found(new) == ["minor: Platform.topology is no longer required", "major: Platform.ops is now required"]


def test_a_renamed_method_is_one_removed_and_one_added(new):
    members = new.names["Communicator"].members
    members["all_sum"] = members.pop("all_reduce")
    assert "major: Communicator.all_reduce was removed" in found(new)


def test_a_field_with_a_default_at_the_end_is_minor(new):
    new.names["Capabilities"].members["sparse"] = Member("field", [], "bool", "False")
    assert found(new) == ["minor: Capabilities.sparse was added"]


def test_a_field_without_a_default_is_major(new):
    new.names["MemoryInfo"].members["shared"] = Member("field", [], "int", required=True)
    assert found(new) == ["major: MemoryInfo.shared was added, and is required"]


def test_a_field_before_others_is_major_because_it_takes_their_position(new):
    entry = new.names["ProbeResult"]
    entry.members = {"since": Member("field", [], "str", "''"), **entry.members}
    assert "major: ProbeResult: since is at the position of available; new fields come last" in found(new)


@pytest.mark.parametrize("what", ["type", "default", "phase"])
def test_another_type_default_or_phase_is_major(new, what):
    member = new.names["Capabilities"].members["fork_safe"]
    before = getattr(member, what)
    setattr(member, what, "str")
    assert found(new) == [f"major: Capabilities.fork_safe: its {what} was {before or 'none'}, is str"]


def test_a_default_for_what_had_to_be_given_is_minor(new):
    member = new.names["ProbeResult"].members["reason"]
    member.default, member.required = "''", False
    assert found(new) == ["minor: ProbeResult.reason is no longer required"]


def test_one_parameter_more_is_major_for_what_plugins_write_since_core_would_pass_it(new):
    new.names["Platform"].members["plan"].parameters.append("strict: bool = False")
    [change] = found(new)
    assert change.startswith("major: Platform.plan: its parameters were (config: EngineConfig), are (config: Engine")


def test_one_parameter_more_is_minor_for_what_plugins_call_if_it_has_a_default(new):
    parameters = new.names["TorchCommunicator"].members["__init__"].parameters
    parameters.append("port: int = 0")
    assert found(new)[0].startswith("minor: TorchCommunicator.__init__: its parameters were")
    parameters[-1] = "port: int"
    assert found(new)[0].startswith("major: TorchCommunicator.__init__: its parameters were")


def test_the_order_of_fields_that_are_given_by_keyword_means_nothing(new):
    assert SURFACE.names["SamplingParams"].keyword_only
    entry = new.names["SamplingParams"]
    entry.members = {"since": Member("field", [], "str", "''"), **entry.members}
    assert found(new) == ["minor: SamplingParams.since was added"]


def test_fields_that_must_be_given_by_keyword_now_are_a_major_change(new):
    new.names["ProbeResult"].keyword_only = True
    assert found(new) == ["major: ProbeResult: its fields are given by keyword now"]


def test_another_base_group_or_hook_is_major(new):
    new.names["ContractError"].bases = ["Exception"]
    new.entry_points = "mvllm.devices"
    new.hooks["mvllm_platform"].parameters = ["core: str"]
    assert found(new) == [
        "major: the entry points' group was mvllm.platforms, is mvllm.devices",
        "major: hook mvllm_platform: its parameters were (), are (core: str)",
        "major: ContractError: its bases was PlatformError, is Exception",
    ]


# --------------------------------------------------------------------------------------------------- which version


def test_an_unrecorded_change_is_reported_with_the_command(new):
    new.names["Profiler"] = Name("class")
    message = unseen_changes(SURFACE, new)
    assert "minor: Profiler was added" in message and message.endswith(f"run: {WRITE}")


def test_before_the_first_release_the_contract_changes_without_its_version(new):
    del new.names["OpCase"]
    new.contract = (1, 0)
    assert missing_step(None, new) == ""
    new.contract = (1, 1)
    assert "stays 1.0" in missing_step(None, new)


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
def test_after_a_release_the_version_takes_the_step_that_the_changes_need(new, change, version, enough):
    if change == "addition":
        new.names["Profiler"] = Name("class")
    if change == "removal":
        del new.names["OpCase"]
    new.contract = version
    released = copy.deepcopy(SURFACE)
    released.contract = (1, 0)
    message = missing_step(released, new)
    assert (message == "") == enough
    if not enough:
        assert "needs CONTRACT = " + ("(2, 0)" if change == "removal" else "(1, 1)") in message


def test_the_newest_release_is_what_counts(tmp_path, new):
    for version in ((1, 9), (1, 10), (1, 2)):
        new.contract = version
        (tmp_path / f"released-{version[0]}.{version[1]}.json").write_text(json.dumps(as_data(new)))
    assert newest_release(tmp_path).contract == (1, 10)


# ---------------------------------------------------------------------------------------- the surface, and the command


def test_every_name_is_there_with_what_python_says_about_it():
    """The source was read without being run; here it is compared with what runs."""
    assert set(SURFACE.names) == set(plugin_api.__all__)
    for name, entry in SURFACE.names.items():
        actual = getattr(plugin_api, name)
        if not isinstance(actual, type):
            continue
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


OPAQUE_TO_PLUGINS = {"Cache", "ReferenceMetadata"}
"""What `ReferenceAttention` makes and is given back."""


def test_every_type_of_ours_in_a_signature_is_a_name_of_the_contract():
    missing = {}
    for name, entry in SURFACE.names.items():
        texts = [
            *entry.bases,
            *(p for f in (entry.itself, *entry.members.values()) if f for p in [*f.parameters, f.type]),
        ]
        words = set(re.findall(r"\b[A-Z]\w+", re.sub(r"'[^']*'", "", " ".join(texts))))
        source = inspect.getsource(sys.modules[plugin_api_home(name)])
        for word in words - set(SURFACE.names) - OPAQUE_TO_PLUGINS:
            # Ours is what the module defines, or imports from mvllm.
            if re.search(rf"^(class )?{word}\b *[(:=]|^from mvllm[^(\n]*(\([^)]*)?\b{word}\b", source, re.MULTILINE):
                missing.setdefault(word, name)
    assert not missing, "a plugin meets these types, and plugin_api lacks them"


@pytest.mark.parametrize("method", ["sleep", "wake_up", "add_lora", "remove_lora", "group_layers", "collect_output"])
def test_a_worker_class_may_leave_out_what_its_page_says_it_may(method):
    assert not SURFACE.names["WorkerProtocol"].members[method].required


def test_every_method_that_plugins_write_has_its_phase():
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


def test_the_hook_is_part_of_it():
    assert list(SURFACE.hooks) == [mvllm_platform.__name__]


def test_json_keeps_all_of_it():
    assert from_data(json.loads(json.dumps(as_data(SURFACE)))) == SURFACE


def test_the_command_prints_every_name_with_its_signature(capsys):
    assert main(["contract"]) == 0
    out = capsys.readouterr().out
    assert out == as_text(SURFACE) + "\n"
    for line in (
        f"contract {plugin_api.CONTRACT[0]}.{plugin_api.CONTRACT[1]}",
        "    required method plan(config: EngineConfig) -> Plan | Refusals  # frontend",
        "    method ops() -> Sequence[OpProvider]  # worker",
        "    field prefix_caching: bool = False",
        "function require_phase(*allowed: Phase) -> None",
    ):
        assert line in out.splitlines()
    assert all(f" {name}" in out for name in plugin_api.__all__)


def test_the_command_compares_with_a_kept_contract(capsys, tmp_path, new):
    kept = tmp_path / "kept.json"
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
