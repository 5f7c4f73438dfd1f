"""The contract's classes have docstrings, and the pages about it agree with the code."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from pathlib import Path

import pytest

from mvllm import plugin_api
from mvllm.config.engine_config import EngineConfig
from mvllm.platform import attention, communicator, graphs, interface, runtime, worker_protocol
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase
from mvllm.platform.spec import CONTRACT, ENTRY_POINT_GROUP, ConfigChange
from mvllm_conformance.contract_surface import read_surface

DOCS = Path(__file__).parents[4] / "docs"
CONTRACT_PAGE = re.sub(  # with list items on one line each
    r"\n  (?=\S)", " ", (DOCS / "reference" / "contract.md").read_text(encoding="utf-8")
)
TOY_PAGE = (DOCS / "tutorials" / "writing-a-platform.md").read_text(encoding="utf-8")

NOT_HERE = {"MvllmError", "ConfigError", "ContractError", "PlatformError"}  # error messages name the responsible party
OPAQUE = {"AttentionMetadata", "DeviceArray", "Dim", "KVCache", "Kind"}
CONFIGURATION = {
    "CacheConfig",
    "EngineConfig",
    "KVEventsConfig",
    "LoRAConfig",
    "LoadConfig",
    "ModelConfig",
    "ModelKind",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "KVConnectorConfig",
    "KVTransferConfig",
}
MESSAGES = {
    "Activation",
    "LoRARequest",
    "ModelRunnerOutput",
    "NewRequestData",
    "PoolingParams",
    "PoolingTask",
    "PoolingType",
    "PositionLogprobs",
    "RequestOutputKind",
    "SamplingParams",
    "SchedulerOutput",
    "StructuredOutputsParams",
    "ThinkingTokens",
}
SURFACE = read_surface(with_graphs=False)
CLASSES = {
    name: cls
    for name in plugin_api.__all__
    if isinstance(cls := getattr(plugin_api, name), type) and name not in NOT_HERE | OPAQUE | CONFIGURATION | MESSAGES
}


def own_methods(cls: type) -> dict[str, object]:
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return {
        name: getattr(cls, name)  # through the class, so that inherited docstrings count
        for name, member in vars(cls).items()
        if not name.startswith("_") and name not in fields and (inspect.isfunction(member) or is_wrapped(member))
    }


def is_wrapped(member: object) -> bool:
    return isinstance(member, classmethod | staticmethod | property)


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - {"Phase"}))
def test_each_class_has_a_phase(name):
    marked = [SURFACE.names[cls.__name__] for cls in CLASSES[name].__mro__ if cls.__name__ in SURFACE.names]
    methods = own_methods(CLASSES[name]).keys() & marked[0].members.keys()
    itself = any(entry.phase for entry in marked)  # an implementation may omit it
    assert itself or (methods and all(marked[0].members[method].phase for method in methods))


@pytest.mark.parametrize("name", CLASSES)
def test_each_method_has_a_docstring(name):
    if issubclass(CLASSES[name], enum.Enum):
        return
    bare = [method for method, m in own_methods(CLASSES[name]).items() if not inspect.getdoc(m)]
    assert not bare


@pytest.mark.parametrize("name", [n for n, c in CLASSES.items() if dataclasses.is_dataclass(c)] + sorted(CONFIGURATION))
def test_each_field_is_described(name):
    cls = CLASSES.get(name) or getattr(plugin_api, name)
    doc = inspect.getdoc(cls) or ""
    described = set(re.findall(r"\w+", " ".join(re.findall(r"^    ([\w, ]+): ", doc, flags=re.MULTILINE))))
    sections = {"model", "cache", "scheduler", "parallel", "load"} if cls is EngineConfig else set()
    assert {f.name for f in dataclasses.fields(cls)} - sections <= described


def test_tensors_are_described_with_their_shapes():
    for method in (attention.AttentionBackend.write_kv, attention.AttentionBackend.forward):
        doc = inspect.getdoc(method) or ""
        assert "[T, num_kv_heads, head_size]" in doc or "[T, num_heads, head_size]" in doc
        assert "compute dtype" in doc


def test_names_are_sorted_and_resolve():
    assert list(plugin_api.__all__) == sorted(plugin_api.__all__, key=lambda n: (n != n.upper(), n[0].islower(), n))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = plugin_api.no_such_name


class TestContractPage:
    def test_the_version_is_that_of_core(self):
        assert CONTRACT_PAGE.startswith(f"# The platform contract, version {CONTRACT[0]}.{CONTRACT[1]}\n")

    def test_the_entry_point_group_is_that_of_core(self):
        assert f"`{ENTRY_POINT_GROUP}`" in CONTRACT_PAGE

    def test_it_lists_every_phase(self):
        table = CONTRACT_PAGE.partition("## Phases")[2].partition("\n## ")[0]
        assert re.findall(r"^\| (\w+) \|", table, flags=re.MULTILINE)[1:] == [phase.value for phase in Phase]

    def test_platform_is_listed_with_all_its_methods_and_those_that_have_defaults(self):
        [line] = [li for li in CONTRACT_PAGE.splitlines() if li.startswith("- `Platform`:")]
        needed, _, optional = line.partition("and with defaults")
        assert set(re.findall(r"`(\w+)`", needed)) - {"Platform"} == set(Platform.__abstractmethods__)
        with_defaults = set(own_methods(Platform)) - set(Platform.__abstractmethods__) - {"graphs"}  # deprecated
        assert set(re.findall(r"`(\w+)`", optional)) == with_defaults

    def test_clauses_are_numbered_without_gaps_or_repeats(self):
        found = re.findall(r"^- ([A-Z0-9]{3})-(\d\d) ", CONTRACT_PAGE, flags=re.MULTILINE)
        by_group: dict[str, list[int]] = {}
        for group, number in found:
            by_group.setdefault(group, []).append(int(number))
        assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in by_group.values())

    def test_clauses_cited_elsewhere_exist(self):
        clauses = set(re.findall(r"^- ([A-Z0-9]{3}-\d\d) ", CONTRACT_PAGE, flags=re.MULTILINE))
        families = "|".join({clause[:3] for clause in clauses})
        root = DOCS.parent
        for folder in ("core", "platforms", "tests", "plugins"):
            for file in (root / folder).rglob("*.py"):
                cited = set(re.findall(rf"\b(?:{families})-\d\d\b", file.read_text("utf-8")))
                assert cited <= clauses, file


@pytest.mark.parametrize("page", ["reference/contract.md", "tutorials/writing-a-platform.md"])
def test_every_name_in_code_style_exists(page):
    """`Class.method`, `Class(...)` and `Class` of the pages are names of the contract, with these parameters."""
    text = re.sub(r"```.*?```", "", (DOCS / page).read_text("utf-8"), flags=re.DOTALL)
    for code in re.findall(r"`([^`]+)`", text):
        match = re.fullmatch(r"([A-Z]\w+)(?:\.(\w+))?(?:\(.*\))?", code)
        if match and match[1] not in ("CONTRACT", "NAME", "MVLLM_PLATFORM", "MemoryError"):
            owner = getattr(plugin_api, match[1])
            assert match[2] is None or hasattr(owner, match[2]) or match[2] in owner.__annotations__, code


def test_signatures_on_the_page_are_those_of_the_code():
    shown = re.findall(r"`(\w+)\((\w[\w, ]*)\)(?: -> \w+)?`", CONTRACT_PAGE)
    assert {name for name, _ in shown} >= {"topology", "init_device", "attention_backend", "communicator"}
    owners = [
        interface.Platform,
        runtime.DeviceRuntime,
        attention.AttentionBackend,
        communicator.Communicator,
        graphs.GraphBackend,
        worker_protocol.WorkerProtocol,
    ]
    for name, parameters in shown:
        if name in plugin_api.__all__:
            actual = [[field.name for field in dataclasses.fields(getattr(plugin_api, name))]]
        else:
            methods = [getattr(owner, name) for owner in owners if name in vars(owner)]
            actual = [[p for p in inspect.signature(method).parameters if p != "self"] for method in methods]
        assert [p.strip() for p in parameters.split(",")] in actual, name


class TestStrictness:
    def test_an_unknown_capability_is_an_error(self):
        with pytest.raises(TypeError, match="time_travel"):
            Capabilities(dtypes=("float32",), kv_dtypes=("float32",), time_travel=True)  # type: ignore[call-arg]

    def test_what_is_not_claimed_is_off(self):
        claimed = Capabilities(dtypes=("float32",), kv_dtypes=("float32",))
        required = {"dtypes", "kv_dtypes", "torch_device", "devices_per_process"}
        assert not any(getattr(claimed, f.name) for f in dataclasses.fields(claimed) if f.name not in required)

    def test_facts_are_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            ConfigChange("cache.block_size", 16, "likes it").value = 32  # type: ignore[misc]

    def test_a_platform_that_lacks_a_method_cannot_be_made(self):
        with pytest.raises(TypeError, match="attention_backend"):
            type("Half", (Platform,), {})()
