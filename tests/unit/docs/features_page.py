"""The matrices of docs/reference/features.md: which features can be combined, and which platforms run them.

python -m tests.unit.docs.features_page      writes them into the page

What is refused, the configuration's own checks say: each pair of features is a configuration that they get, with the
capabilities of the CPU platform; for platforms, with the capabilities of the platform's report. What is tested is read
from the tests: a pair where one case of a test function names the settings of both, in the function or in the case.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import EngineConfig
from mvllm.engine.core.capability_checks import required_config_changes
from mvllm.errors import ConfigError
from mvllm.platform.capabilities import Capabilities
from tests.unit.config.folders import write_folder
from tests.unit.docs.guide_tables import with_table
from tests.unit.docs.platforms_page import is_shown, read_records

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "features.md"


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature that settings of the engine switch on.

    Attributes:
        name: As the tables show it.
        settings: The settings.
        words: What a test that uses it has in its text: names of settings, quoted or as keywords.
        capability: The capability whose clauses test it on a platform; None for none.
    """

    name: str
    settings: Mapping[str, Any]
    words: tuple[str, ...]
    capability: str | None = None


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
FEATURES = (
    Feature("prefix caching", {"enable_prefix_caching": True}, ("num_cached_tokens",), "prefix_caching"),
    Feature(
        "chunked prefill", {"enable_chunked_prefill": True}, ("max_num_batched_tokens", "TIGHT"), "chunked_prefill"
    ),
    Feature("tensor parallel", {"tensor_parallel_size": 2}, ("tensor_parallel_size",), "collectives"),
    Feature("pipeline parallel", {"pipeline_parallel_size": 2}, ("pipeline_parallel_size",), "collectives"),
    Feature("data parallel", {"data_parallel_size": 2}, ("data_parallel_size",)),
    Feature("async scheduling", {"async_scheduling": True}, ("async_scheduling",)),
    Feature("speculative decoding", {"speculative_config": NGRAM}, ("speculative_config", "spec_config")),
    Feature("LoRA", {"enable_lora": True}, ("enable_lora", "LoRARequest", "lora_request")),
    Feature("quantized weights", {"quantization": "int8"}, ("quantization", "make_quantized")),
    Feature("quantized KV cache", {"kv_cache_dtype": "int8"}, ("kv_cache_dtype",)),
    Feature(
        "KV tiers", {"kv_offloading_size": 0.01}, ("kv_offloading_size", "kv_disk_cache", "kv_transfer_config"),
        "kv_transfer",
    ),
    Feature("batch invariance", {"batch_invariant": True}, ("batch_invariant", "invariant_engine"), "batch_invariant"),
    Feature("sleep", {}, (r"(?<!time\.)(?<!asyncio\.)sleep",)),
    Feature("weight updates", {}, ("update_weights",)),
)  # fmt: skip
"""In the order of the tables."""

PATTERNS = {each.name: re.compile("|".join(rf"\b{word}\b" for word in each.words)) for each in FEATURES}

_INVARIANT = "tests/engine/test_batch_invariance.py::test_more_requests_dtypes_and_paths"
MORE_TESTS = {
    ("batch invariance", "chunked prefill"): _INVARIANT,
    ("batch invariance", "prefix caching"): _INVARIANT,
    ("batch invariance", "quantized KV cache"): _INVARIANT,
    ("batch invariance", "quantized weights"): _INVARIANT,
    ("async scheduling", "pipeline parallel"): "tests/engine/test_multiproc_parity.py::"
    "test_async_scheduling_gives_the_tokens_of_transformers",
}
"""Tests whose settings are not in their text but in constants and helpers, by the pairs that they use."""

PLATFORM_TESTS = {
    "cpu": ("tests/engine", "tests/conformance", "tests/e2e", "platforms/cpu/tests"),
    "cuda": (),
    "example": ("tests/engine/test_example_device.py", "plugins/example-device/tests"),
    "mlx": ("platforms/mlx/tests",),
    "openvino": ("platforms/openvino/tests",),
    "rocm": (),
    "tpu": ("platforms/tpu/tests",),
    "xpu": (),
}
"""Tests that run a platform's device; none where the device is not there when tests run."""

DEVICE_RECORDS = {"cuda": {"chunked prefill", "async scheduling", "speculative decoding"}}
"""What has run on a device by hand, as docs/how-to/gpu-runs.md records."""

ENGINE_TESTS = ("tests/engine", "tests/conformance", "tests/e2e", "plugins/kv-transfer/tests", "plugins/graph/tests")


def named_features(text: str) -> frozenset[str]:
    """The features that a text names."""
    return frozenset(name for name, pattern in PATTERNS.items() if pattern.search(text))


def features_of_cases(source: str) -> set[frozenset[str]]:
    """The features that the cases of the test functions in a file use: those that the function names, and those of one
    set of its parameters."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            choices = [{named_features("\n".join(map(ast.unparse, [node.args, *node.body])))}]
            for decorator in node.decorator_list:
                values = decorator.args[1] if isinstance(decorator, ast.Call) and len(decorator.args) > 1 else decorator
                cases = values.elts if isinstance(values, ast.List | ast.Tuple) else [values]
                choices.append({named_features(ast.unparse(case)) for case in cases})
            found |= {frozenset().union(*case) for case in itertools.product(*choices)}
    return found


@cache
def used_features(folders: tuple[str, ...]) -> dict[str, set[frozenset[str]]]:
    """The names of the features that each test case uses, by the path of its file."""
    paths = [ROOT / folder for folder in folders]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    return {str(file.relative_to(ROOT)): features_of_cases(file.read_text("utf-8")) for file in files}


def tests_with(features: tuple[Feature, ...], folders: tuple[str, ...] = ENGINE_TESTS) -> list[str]:
    """The files with a test case that uses all of the features."""
    names = {feature.name for feature in features}
    more = [
        test.partition("::")[0] for pair, test in MORE_TESTS.items() if folders == ENGINE_TESTS and names == {*pair}
    ]
    return more or [file for file, used in used_features(folders).items() if any(names <= each for each in used)]


@cache
def _folder() -> Path:
    return write_folder(Path(tempfile.mkdtemp(prefix="mvllm-features-")), num_hidden_layers=2)


@cache
def _config(names: tuple[str, ...]) -> EngineConfig:
    settings: dict[str, Any] = {}
    for feature in FEATURES:
        if feature.name in names:
            settings |= feature.settings
    return EngineArgs(model=str(_folder()), **settings).create_engine_config()


def capabilities_of(record: Mapping[str, Any]) -> Capabilities:
    """The capabilities of a platform's report."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Capabilities):
        text = record["capabilities"].get(field.name)
        if text is None:
            continue
        kind = str(field.type)
        if kind == "bool":
            values[field.name] = text == "True"
        elif kind.startswith("int"):
            values[field.name] = None if text in ("None", "any") else int(text)
        else:
            names = [] if text in ("", "none") else text.split(", ")
            values[field.name] = frozenset(names) if kind.startswith("frozenset") else tuple(names)
    return Capabilities(**values)


def outcome(features: tuple[Feature, ...], capabilities: Capabilities, platform: str) -> tuple[str | None, set[str]]:
    """Why the configuration of some features is refused, and the settings that the platform changes in it."""
    try:
        config = _config(tuple(sorted(feature.name for feature in features)))
        changes = list(required_config_changes(config, capabilities, platform))
    except ConfigError as e:
        return str(e), set()
    return None, {change.field for change in changes}


def combinations() -> tuple[list[list[str]], list[str]]:
    """The rows of the first matrix, and its footnotes."""
    capabilities = capabilities_of(read_records()["cpu"])
    notes: list[str] = []
    rows = []
    for i, one in enumerate(FEATURES):
        row = [one.name]
        for other in FEATURES[: i + 1]:
            if other is one:
                row.append("")
                continue
            refusal, _ = outcome((one, other), capabilities, "cpu")
            if refusal is not None:
                row.append(f"refused {_note(notes, refusal)}")
            else:
                row.append("yes" if tests_with((one, other)) else "untested")
        rows.append(row)
    return rows, notes


def platform_rows() -> tuple[list[list[str]], list[str], list[str]]:
    """The platforms, the rows of the second matrix and its footnotes."""
    records = {name: record for name, record in read_records().items() if name == record["platform"]}
    notes: list[str] = []
    rows = []
    for feature in FEATURES:
        row = [feature.name]
        for name, record in records.items():
            row.append(_platform_cell(feature, name, record, notes))
        rows.append(row)
    return list(records), rows, notes


def _platform_cell(feature: Feature, name: str, record: Mapping[str, Any], notes: list[str]) -> str:
    refusal, changes = outcome((feature,), capabilities_of(record), name)
    if refusal is not None:
        return f"refused {_note(notes, refusal)}"
    if any(change.rpartition(".")[2] in feature.settings for change in changes):
        return "off"
    if feature.capability is not None and is_shown(record, feature.capability):
        return "yes"
    has_run = feature.name in DEVICE_RECORDS.get(name, ()) or tests_with((feature,), PLATFORM_TESTS[name])
    return "yes" if has_run else "untested"


def _note(notes: list[str], refusal: str) -> str:
    plain = re.sub(r"the platform '\w+'", "the platform", refusal)
    if plain not in notes:
        notes.append(plain)
    return f"[{notes.index(plain) + 1}]"


def _table(head: list[str], rows: list[list[str]], notes: list[str]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
    texts = [f"{number}. {' '.join(text.split())}" for number, text in enumerate(notes, 1)]
    return "\n".join(lines) + ("\n\nRefused because:\n\n" + "\n".join(texts) if texts else "")


def covering_files() -> Iterator[str]:
    """A line for each pair that a test covers, with its files."""
    for one, other in itertools.combinations(FEATURES, 2):
        if files := tests_with((one, other)):
            yield f"{one.name} and {other.name}: {', '.join(files)}"


def tables() -> dict[str, str]:
    """Every generated part of the page by its name."""
    rows, notes = combinations()
    rows = [row + [""] * (len(FEATURES) - len(row)) for row in rows]
    pairs = _table(["", *(feature.name for feature in FEATURES[:-1])], rows, notes)
    names, platform_table, platform_notes = platform_rows()
    head = ["", *(f"`{name}`" for name in names)]
    return {"combinations": pairs, "features of platforms": _table(head, platform_table, platform_notes)}


def page() -> str:
    """The page with its matrices."""
    text = PAGE.read_text("utf-8")
    for name, table in tables().items():
        text = with_table(text, name, table)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(json.dumps(list(covering_files()), indent=1))
