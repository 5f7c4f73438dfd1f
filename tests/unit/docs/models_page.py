"""The tables of docs/reference/models.md: models by the names that people know, and features of each model family that
passing tests cover.

python -m tests.unit.docs.models_page RUN.json ...      merges the results of runs into the record, writes the page
python -m tests.unit.docs.models_page                   writes the page from the record

`ci/dev.py test` writes its results to build/shown/. The record keeps the tests that a run did not collect, and drops
marks and tests that no longer exist.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.model_coverage import IMPLS, Coverage, as_json, from_json
from tests.unit.docs import guide_tables

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "models.md"
RECORD = Path(__file__).with_name("models_shown.json")
BEGIN, END = "<!-- table: models -->\n", "\n<!-- end of table -->"
COLUMNS = {"tokens": "tokens", "tp": "TP", "pp": "PP", "quantization": "quantization", "lora": "LoRA"}
HOWS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "w4a16": "W4A16",
    "w8a16": "W8A16",
    "w8a8": "W8A8",
    "fp8": "FP8",
    "mxfp4": "MXFP4",
}
"""Quantization methods with the names that users know; others have the names of the tests."""

NAMES: tuple[tuple[str, str, str, str], ...] = (
    ("Qwen3", "Qwen/Qwen3-8B", "qwen3", "qwen3"),
    ("Qwen3 with experts", "Qwen/Qwen3-30B-A3B", "qwen3_moe", "qwen3moe"),
    ("Qwen3-VL", "Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl", "qwen3vl"),
    ("Qwen2.5", "Qwen/Qwen2.5-7B-Instruct", "qwen2", "qwen2"),
    ("Llama 3.1, 3.2, 3.3", "meta-llama/Llama-3.1-8B-Instruct", "llama", "llama"),
    ("Llama 4", "meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_text", "llama4"),
    ("Gemma 3, text", "google/gemma-3-1b-it", "gemma3_text", "gemma3"),
    ("Gemma 3 with images", "google/gemma-3-4b-it", "gemma3", ""),
    ("Gemma 4", "google/gemma-4-E4B-it", "gemma4", "gemma4"),
    ("Mistral", "mistralai/Mistral-7B-Instruct-v0.3", "mistral", "llama"),
    ("Mistral Small 3, Ministral 3", "mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral3", "mistral3"),
    ("Mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral", "llama"),
    ("Phi-4", "microsoft/phi-4", "phi3", "phi3"),
    ("gpt-oss", "openai/gpt-oss-20b", "gpt_oss", "gpt-oss"),
    ("DeepSeek V3, R1", "deepseek-ai/DeepSeek-R1", "deepseek_v3", "deepseek2"),
    ("DeepSeek V3.2", "deepseek-ai/DeepSeek-V3.2", "deepseek_v32", ""),
    ("DeepSeek-R1-Distill", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2", "qwen2"),
    ("GLM-4.5, 4.6, 4.7", "zai-org/GLM-4.5-Air", "glm4_moe", "glm4moe"),
    ("SmolLM2", "HuggingFaceTB/SmolLM2-135M-Instruct", "llama", "llama"),
    ("SmolLM3", "HuggingFaceTB/SmolLM3-3B", "smollm3", "smollm3"),
    ("Granite 4", "ibm-granite/granite-4.0-h-tiny", "granitemoehybrid", "granitehybrid"),
    ("OLMo 3", "allenai/Olmo-3-7B-Instruct", "olmo3", "olmo2"),
    ("Whisper", "openai/whisper-large-v3", "whisper", ""),
)
"""What people say, a name on the hub, the `model_type` that runs it, and the architecture of its GGUF files."""

TEXT_ONLY = ("qwen3vl", "gemma4", "mistral3")
"""GGUF files of which the language part is read."""

PUBLISHED = {"HuggingFaceTB/SmolLM2-135M-Instruct": "published weights", "google/gemma-3-1b-it": "published weights"}
"""Rows of which tests run a model with its published weights: SmolLM2 135M, Gemma 3 270M."""


def names_table(record: Coverage) -> str:
    """One row for each name."""
    lines = ["| model | for example | runs as | files | tested |", "|---|---|---|---|---|"]
    for name, example, family, gguf in NAMES:
        rows = {(impl, what, how) for f, impl, what, how in record if f == family}
        impl = min((impl for impl, _, _ in rows), key=IMPLS.index)
        kinds = [title for what, title in COLUMNS.items() if any((i, w) == (impl, what) for i, w, _ in rows)]
        tested = ", ".join([*([PUBLISHED[example]] if example in PUBLISHED else []), *kinds])
        files = "safetensors" + (", GGUF" if gguf else "") + (" (text)" if gguf in TEXT_ONLY else "")
        lines.append(f"| {name} | `{example}` | `{family}`, {impl} | {files} | {tested} |")
    return "\n".join(lines)


def read_record() -> Coverage:
    return from_json(json.loads(RECORD.read_text(encoding="utf-8")))


def merged_record(record: Coverage, collected: Coverage, passed: Coverage) -> Coverage:
    """The record after a run: passed tests are added, and claims that a collected file no longer makes are dropped."""
    files = {test.partition("::")[0] for tests in collected.values() for test in tests}
    kept = {
        claim: {test for test in tests if test.partition("::")[0] not in files or test in collected.get(claim, ())}
        for claim, tests in record.items()
    }
    for claim, tests in passed.items():
        kept.setdefault(claim, set()).update(tests)
    return {claim: tests for claim, tests in kept.items() if tests}


def table(record: Coverage) -> str:
    """One row for each family and implementation."""
    rows = sorted({(family, IMPLS.index(impl)) for family, impl, _, _ in record})
    lines = [f"| `model_type` | implementation | {' | '.join(COLUMNS.values())} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for family, impl in rows:
        cells = []
        for feature in COLUMNS:
            hows = sorted(how for f, i, what, how in record if (f, i, what) == (family, IMPLS[impl], feature))
            cells.append(", ".join(HOWS.get(how, how) for how in hows if how) or ("yes" if hows else "–"))
        lines.append(f"| `{family}` | {IMPLS[impl]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sources(record: Coverage) -> str:
    """The tests of each column."""
    lines = []
    for feature, title in COLUMNS.items():
        tests = sorted({test for (_, _, what, _), tests in record.items() if what == feature for test in tests})
        files: dict[str, list[str]] = {}
        for test in tests:
            files.setdefault(test.partition("::")[0], []).append(test.rpartition("::")[2])
        if files:
            text = f"- **{title}**: {', '.join(f'`{file}`' for file in files)}"
            lines += textwrap.wrap(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def with_table(page: str, record: Coverage) -> str:
    """The page with new tables."""
    page = guide_tables.with_table(page, "models by name", names_table(record))
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} has no place for the table"
    return f"{before}{BEGIN}{table(record)}\n\nShown by:\n\n{sources(record)}{end}{after}"


def main(runs: Iterable[Path]) -> None:
    record = read_record() if RECORD.exists() else {}
    for run in runs:
        notes = json.loads(run.read_text(encoding="utf-8"))
        record = merged_record(record, from_json(notes["collected"]), from_json(notes["passed"]))
    rows = ",\n".join(f" {json.dumps(row)}" for row in as_json(record))
    RECORD.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


if __name__ == "__main__":
    main(map(Path, sys.argv[1:]))
