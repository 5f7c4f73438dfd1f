"""Counts what becomes of a corpus of JSON schemas: enforced, relaxed, refused, and what their instances show.

    python -m tests.perf.schema_corpus FOLDER [--every 10] [--jobs 2] [--closed] [--show 20]

A file is one of these:

    {"schema": {...}, "tests": [{"data": ..., "valid": true}, ...]}         MaskBench
    [{"schema": {...}, "tests": [{"data": ..., "valid": true}, ...]}, ...]  JSON-Schema-Test-Suite
    {...}                                                                   a schema alone

Objects that declare properties are closed by the engine. Suites' instances have other keys, so objects without a rule
for them are counted with `additionalProperties: true`, unless `--closed`. A valid instance whose keys are in another
order than the schema's is counted as rejected only if it is rejected in the schema's order, too.

No corpus is part of the repository. Exit status 1 if an invalid instance is accepted although nothing was relaxed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from mvllm.config.engine_args import EngineArgs
from mvllm.demo import demo_model_path
from mvllm.engine.core.grammars import load_vocabulary
from mvllm.errors import RequestError
from mvllm.messages.structured_outputs import StructuredOutputsParams
from mvllm.structured_output import llguidance_library
from mvllm.structured_output.sandbox_main import CompileJob, compile_job
from mvllm.structured_output.schema_rewriting import is_annotation, keyword

_DATA = ("const", "enum", "default", "examples")


@dataclass
class Result:
    """What became of one schema.

    Attributes:
        error: Why it is refused; None if it is not.
        relaxations: What is not enforced.
        num_valid, num_invalid: Its instances.
        rejected: Descriptions of valid instances that the grammar rejects.
        accepted: Descriptions of invalid instances that it accepts.
    """

    name: str
    error: str | None = None
    relaxations: list[str] = field(default_factory=list)
    num_valid: int = 0
    num_invalid: int = 0
    rejected: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description="Counts what becomes of a corpus of JSON schemas.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1, help="Take one file of this many.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--closed", action="store_true", help="Close objects that declare properties.")
    parser.add_argument("--show", type=int, default=20, help="Most lines of each list.")
    args = parser.parse_args()
    files = sorted(args.folder.rglob("*.json"))[:: args.every]
    with ProcessPoolExecutor(args.jobs) as pool:
        run = partial(check_file, is_closed=args.closed)
        results = [result for each in pool.map(run, files, chunksize=20) for result in each]
    return report(results, args.show)


def report(results: list[Result], most: int) -> int:
    """Prints the counts. Returns the exit status."""
    refused = [each for each in results if each.error is not None]
    relaxed = [each for each in results if each.error is None and not all(map(is_annotation, each.relaxations))]
    annotated = [each for each in results if each.error is None and each.relaxations and each not in relaxed]
    print(f"{len(results)} schemas: {len(refused)} refused ({len(refused) / max(1, len(results)):.2%}), "
          f"{len(relaxed)} relaxed, {len(annotated)} with unknown formats alone")  # fmt: skip
    _show("relaxed by", Counter(k for each in relaxed for k in {keyword(r).split(" '")[0] for r in each.relaxations}))
    _show(
        "refused by", Counter(re.sub(r"\"[^\"]*\"|'[^']*'|#\S*|\d+", "_", each.error or "")[:100] for each in refused)
    )
    wrong = [each for each in results if each.accepted]
    silent = [each for each in wrong if all(map(is_annotation, each.relaxations))]
    print(f"{sum(each.num_valid for each in results)} valid instances, "
          f"{sum(len(each.rejected) for each in results)} rejected; "
          f"{sum(each.num_invalid for each in results)} invalid instances, "
          f"{sum(len(each.accepted) for each in wrong)} accepted, "
          f"{sum(len(each.accepted) for each in silent)} of them where nothing was relaxed")  # fmt: skip
    for title, lines in (
        ("accepted", [f"{each.name}: {line} {each.relaxations}" for each in silent for line in each.accepted]),
        ("rejected", [f"{each.name}: {line}" for each in results for line in each.rejected]),
    ):
        for line in lines[:most]:
            print(f"{title} {line}")
    return 1 if any(not each.relaxations for each in silent) else 0


def _show(title: str, counts: Counter[str]) -> None:
    for name, count in counts.most_common():
        print(f"  {title} {name}: {count}")


def check_file(path: Path, *, is_closed: bool) -> list[Result]:
    """The results of a file's schemas."""
    content = json.loads(path.read_text(encoding="utf-8"))
    groups = content if isinstance(content, list) else [content]
    return [
        check_schema(path.stem if len(groups) == 1 else f"{path.stem}[{i}]", group, is_closed=is_closed)
        for i, group in enumerate(groups)
    ]


def check_schema(name: str, group: dict[str, Any], *, is_closed: bool) -> Result:
    """The result of one schema and its instances."""
    schema, tests = (group["schema"], group.get("tests", [])) if "schema" in group else (group, [])
    tokenizer, result = _tokenizer(), Result(name)
    try:
        params = StructuredOutputsParams(json=schema if is_closed else _opened(schema))
    except RequestError as e:
        result.error = str(e)
        return result
    compiled = compile_job(tokenizer, CompileJob("json", str(params.json)))
    result.error, result.relaxations = compiled.error, list(compiled.relaxations)
    if compiled.error is not None:
        return result
    api = llguidance_library.load()
    beginning = api.LLMatcher(tokenizer, compiled.grammar, log_level=0, limits=llguidance_library.limits(api))
    order = {name: i for i, name in enumerate(dict.fromkeys(_property_names(schema)))}

    def accepts(value: Any) -> bool:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        matcher = beginning.deep_copy()
        tokens = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())

    for i, test in enumerate(tests):
        is_accepted = accepts(test["data"]) or (test["valid"] and accepts(_ordered(test["data"], order)))
        description = f"instance {i} ({str(test.get('description'))[:60]})"
        if test["valid"]:
            result.num_valid += 1
            result.rejected += [] if is_accepted else [description]
        else:
            result.num_invalid += 1
            result.accepted += [description] if is_accepted else []
    return result


@cache
def _tokenizer() -> Any:
    return load_vocabulary(EngineArgs(model=str(demo_model_path())).create_engine_config().model).build()


def _opened(schema: Any) -> Any:
    """The schema with open objects where it has no rule for other keys."""
    if isinstance(schema, dict):
        opened = {key: value if key in _DATA else _opened(value) for key, value in schema.items()}
        if isinstance(schema.get("properties"), dict) and "unevaluatedProperties" not in schema:
            opened.setdefault("additionalProperties", True)
        return opened
    return [_opened(each) for each in schema] if isinstance(schema, list) else schema


def _property_names(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield from schema["properties"]
        for value in schema.values():
            yield from _property_names(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _property_names(value)


def _ordered(value: Any, order: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(value[key], order) for key in sorted(value, key=lambda key: order.get(key, len(order)))}
    return [_ordered(each, order) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
