"""docs/reference/python-api.md and the pages in docs/reference/python: every name that `mvllm` exports, with its
signature, its docstring and an example.

python -m tests.unit.docs.python_api_page    writes the pages from the docstrings and the functions of examples

The examples are functions that tests run: tests/e2e/python_api_examples.py, and that of mvllm-image-generation.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

import mvllm
from mvllm.config.engine_args import EngineArgs
from tests.e2e import python_api_examples

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
PAGE = REFERENCE / "python-api.md"
WIDTH = 100
TABLES = {"EngineArgs": "engine-settings.md", "SamplingParams": "sampling-parameters.md"}
"""Classes whose fields have a separate page."""
KINDS = {
    "LLM": ("LLM",),
    "Inputs": (
        *("SamplingParams", "RequestOutputKind", "StructuredOutputsParams", "BeamSearchParams", "PoolingParams"),
        *("TextPrompt", "TokensPrompt", "LoRARequest"),
    ),
    "Outputs": (
        *("RequestOutput", "CompletionOutput", "Logprob", "BeamSearchOutput", "PoolingRequestOutput"),
        *("EmbeddingRequestOutput", "ClassificationRequestOutput", "ScoringRequestOutput"),
    ),
    "AsyncLLM": ("AsyncLLM",),
    "EngineArgs": ("EngineArgs",),
    "LLMEngine": ("LLMEngine",),
    "Errors": ("MvllmError", "RequestError", "RequestFailedError", "ConfigError", "ModelError", "PlatformError"),
    "Weights": ("SharedMemoryWeights", "WeightTransferGroup", "WeightTransferInfo"),
}
"""The pages, in the order in which a reader needs them, with their classes."""

IMAGES = "mvllm.images"
IMAGES_TITLE = "Image generation"
IMAGE_NAMES = ("Images", "AsyncImages", "ImageParams", "ImageRequestOutput", "GeneratedImage")
"""Names of the package mvllm-image-generation, of which `mvllm` exports those that users make or read."""

ALIASES = {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}
"""Further names of classes."""

SAME_EXAMPLE = {"WeightTransferInfo": "WeightTransferGroup"}
"""Classes whose example is that of another one on the same page."""

METHODS = {
    "Generate": ("generate", "chat", "beam_search", "generate_images", "decode_images"),
    "Embed, classify and score": ("encode", "embed", "classify", "reward", "score"),
    "Requests": (
        *("add_request", "step", "has_unfinished_requests", "abort", "abort_request", "add_processed_requests"),
        *("add_caller", "next_outputs", "remove_caller", "wake"),
    ),
    "Start and end": ("from_engine_args", "from_vllm_config", "close", "shutdown"),
    "Adapters and weights": (
        *("add_lora", "remove_lora", "list_loras", "update_lora", "update_weights", "start_weight_update"),
        *("finish_weight_update", "abandon_weight_update", "weight_info", "init_weight_transfer_engine"),
        *("collective_rpc", "call_workers", "apply_model", "call_model"),
    ),
    "Pause, sleep and caches": (
        *("pause_generation", "resume_generation", "is_paused", "is_scheduler_paused", "require_not_paused"),
        *("sleep", "wake_up", "is_sleeping", "is_asleep", "reset_prefix_cache", "reset_mm_cache"),
    ),
}
"""Methods by use, in the order of the pages; others come last."""

MAX_PARAMETERS = 10
"""A signature with more of them is a table."""

_IMPORTS = {"asyncio": "import asyncio", "np": "import numpy as np"}
_FROM = {
    "ThreadPoolExecutor": "from concurrent.futures import ThreadPoolExecutor",
    "load_file": "from safetensors.torch import load_file",
}


def file_name(title: str) -> str:
    """The page of a kind, below docs/reference/python."""
    return title.lower().replace(" ", "-") + ".md"


def pages() -> dict[Path, str]:
    """The text of every page by its path."""
    found = {PAGE: index_page()}
    for title, names in KINDS.items():
        sections = [class_section(name, getattr(mvllm, name), python_api_examples) for name in names]
        found[REFERENCE / "python" / file_name(title)] = "\n".join([f"# {title}\n", *sections])
    package = importlib.import_module(IMAGES)
    examples = importlib.import_module("plugins.image-generation.tests.python_api_examples")
    text = (
        "Of the package `mvllm-image-generation` ([parts](../../how-to/install.md)): `llm.images` is an Images, and "
        "the `images` of an AsyncLLM an AsyncImages. `generate_images` and `decode_images` of both are its methods "
        "`generate` and `decode`."
    )
    sections = [class_section(name, getattr(package, name), examples) for name in IMAGE_NAMES]
    head = f"# {IMAGES_TITLE}\n\n{textwrap.fill(text, WIDTH)}\n"
    found[REFERENCE / "python" / file_name(IMAGES_TITLE)] = "\n".join([head, *sections])
    return {path: text.rstrip() + "\n" for path, text in found.items()}


def index_page() -> str:
    """The page with a line for each class."""
    lines = [
        "# Python API",
        "",
        "What `from mvllm import ...` offers. Names that are not on these pages are internal and may change.",
        "",
        example("LLM", python_api_examples),
        "",
        "| class | what it is |",
        "|---|---|",
    ]
    package = importlib.import_module(IMAGES)
    every = [(title, name, getattr(mvllm, name)) for title, names in KINDS.items() for name in names]
    every += [(IMAGES_TITLE, name, getattr(package, name)) for name in IMAGE_NAMES]
    for title, name, cls in every:
        sentence = re.split(r"(?<=[.])\s", (inspect.getdoc(cls) or "").strip())[0]
        lines.append(f"| [{name}](python/{file_name(title)}#{name.lower()}) | {' '.join(sentence.split())} |")
    names = " and ".join(f"`{alias}` is `{name}`" for alias, name in ALIASES.items())
    lines += ["", f"{names}."]
    generated = (
        "These pages are generated from the docstrings, and their examples are run by tests "
        "(`python -m tests.unit.docs.python_api_page`)."
    )
    return "\n".join([*lines, "", textwrap.fill(generated, WIDTH)])


def class_section(name: str, cls: type, examples: ModuleType) -> str:
    """One class with its example and its public methods."""
    lines = [f"## {name}", ""]
    has_signature = not issubclass(cls, BaseException | dict | enum.Enum)
    is_plain = has_signature and not (issubclass(cls, msgspec.Struct) or dataclasses.is_dataclass(cls))
    table = parameter_table(name, cls.__init__, inspect.getdoc(cls) or "") if is_plain else None
    if has_signature:
        lines += [code(table[0] if table is not None else class_signature(name, cls)), ""]
    skip = (("Attributes",) if name in TABLES else ()) + (("Args",) if table is not None else ())
    summary, _, rest = markdown(inspect.getdoc(cls) or "", skip=skip).partition("\n\n")
    same = SAME_EXAMPLE.get(name)
    lines += [summary, "", f"Its example is that of [{same}](#{same.lower()})." if same else example(name, examples)]
    lines += ["", *([table[1], ""] if table is not None else []), *([rest, ""] if rest else [])]
    if name in TABLES:
        lines += [f"The fields are in [{TABLES[name].removesuffix('.md')}](../{TABLES[name]}).", ""]
    if issubclass(cls, enum.Enum):
        lines += [", ".join(f"`{member.name}`" for member in cls), ""]
    methods = {method: (kind, function) for method, kind, function in public_methods(cls)}
    for title, names in {**METHODS, "State and settings": [*methods]}.items():
        shown = [(method, *methods.pop(method)) for method in names if method in methods]
        if shown:
            lines += [f"### {title}", ""]
        for method, kind, function in shown:
            lines += method_section(name, method, kind, function)
    return "\n".join(lines)


def method_section(name: str, method: str, kind: str, function: Any) -> list[str]:
    """The lines of one method or property."""
    docstring = inspect.getdoc(function) or ""
    if kind == "property ":
        shown, table = f"{method}: {returned(function)}", None
    else:
        table = parameter_table(f"{kind}{method}", function, docstring)
        shown = f"{kind}{method}{signature(function)}" if table is None else table[0]
    if table is None:
        return [f"#### {name}.{method}", "", code(shown), "", markdown(docstring), ""]
    summary, _, rest = markdown(docstring, skip=("Args",)).partition("\n\n")
    return [f"#### {name}.{method}", "", code(shown), "", summary, "", table[1], "", *([rest, ""] if rest else [])]


def example(name: str, examples: ModuleType) -> str:
    """The example of a class, as a program."""
    function = getattr(examples, f"example_{name}")
    source = inspect.getsource(function)
    body = textwrap.dedent(source[re.search(r"\) -> None:\n", source).end() :]).strip()  # type: ignore[union-attr]
    setup = []
    for each, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            setup.append(f"{each} = {parameter.default!r}".replace("'", '"'))
        elif each == "engine":
            setup += [examples.SETUP["llm"], examples.SETUP["engine"]]
        else:
            setup.append(examples.SETUP[each])
    body = re.sub(r"\b(async_llm|embedder|classifier|adapted|other_process)\b", "llm", body)
    setup = [line.replace("async_llm = ", "llm = ") for line in setup]
    end = []
    if inspect.iscoroutinefunction(function):
        indented = textwrap.indent(body, "    ")
        body, end = f"async def main() -> None:\n{indented}", ["asyncio.run(main())", "llm.shutdown()"]
    text = "\n".join([*setup, body, *end])
    words = set(re.findall(r"\b\w+\b", re.sub(r'#.*|"[^"\n]*"', "", text)))
    imports = [line for word, line in _IMPORTS.items() if word in words]
    imports += [line for word, line in _FROM.items() if word in words]
    used = sorted(words & {*mvllm.__all__})
    imports.append(f"from mvllm import {', '.join(used)}")
    if len(imports[-1]) > 100:
        imports[-1] = f"from mvllm import (\n    {', '.join(used)},\n)"
    separator = "\n\n" if inspect.iscoroutinefunction(function) else "\n"
    whole = "\n".join(imports) + "\n\n" + separator.join(filter(None, ["\n".join(setup), body, "\n".join(end)]))
    return f"```python\n{whole}\n```"


def parameter_table(shown: str, function: Any, docstring: str) -> tuple[str, str] | None:
    """A short signature and the table of the parameters, if they are too many to write out; else None.

    A parameter that the docstring does not explain is a setting of the engine, explained with those.
    """
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls")]
    if len(parameters) <= MAX_PARAMETERS:
        return None
    block = re.search(r"Args:\n(.*?)(?:\n\n|\Z)", docstring, re.DOTALL)
    meanings: dict[str, str] = {setting.name: setting.help for setting in EngineArgs.options()}
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(block[1] if block else "").strip()):
        names, _, meaning = " ".join(entry.split()).partition(": ")
        meanings |= dict.fromkeys(names.split(", "), meaning)
    required = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    result = inspect.signature(function).return_annotation
    arrow = "" if result in ("None", None, inspect.Signature.empty) else f" -> {result}"
    rows = ["| parameter | type | default | meaning |", "|---|---|---|---|"]
    for each in parameters:
        default = "" if each.default is each.empty else f"`{default_text(each.default)}`"
        kind = "" if each.annotation is each.empty else f"`{each.annotation}`"
        row = (f"`{each.name}`", kind, default, meanings.get(each.name, ""))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return f"{shown}({', '.join([*required, '...'])}){arrow}", "\n".join(rows)


ENGINES = ("LLM", "AsyncLLM", "LLMEngine")
"""Classes whose methods are on the pages."""


def public_methods(cls: type) -> Iterator[tuple[str, str, Any]]:
    """(name, kind, function) of a class's members in the order of their source, its own before inherited ones."""
    if cls.__name__ not in ENGINES:
        return
    owners = [owner for owner in cls.__mro__ if owner.__module__.startswith("mvllm.")]
    members = {name: inspect.getattr_static(cls, name) for owner in owners for name in vars(owner)}
    for name, member in members.items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield name, "property ", member.fget
        elif isinstance(member, classmethod | staticmethod):
            yield name, "", member.__func__
        elif inspect.isfunction(member):
            yield name, "async " if inspect.iscoroutinefunction(inspect.unwrap(member)) else "", member


def class_signature(name: str, cls: type) -> str:
    if name in TABLES:
        return f"{name}({'model, ' if name == 'EngineArgs' else ''}...)"
    if issubclass(cls, msgspec.Struct):
        fields = [(f.name, f.default, f.default_factory) for f in msgspec.structs.fields(cls)]
    elif dataclasses.is_dataclass(cls):
        fields = [(f.name, f.default, f.default_factory) for f in dataclasses.fields(cls)]
    else:
        return f"{name}{signature(cls.__init__)}"
    missing = (msgspec.NODEFAULT, dataclasses.MISSING)
    parameters = [
        f"{each}={value!r}" if value not in missing else each if factory in missing else f"{each}=..."
        for each, value, factory in fields
    ]
    return f"{name}({', '.join(parameters)})"


def signature(function: Any) -> str:
    """Parameters and result as written in the source, without `self` and `cls`."""
    found = inspect.signature(function)
    parameters, keyword_only = [], False
    for name, parameter in found.parameters.items():
        if name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parameters.append("*")
            keyword_only = True
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f" = {default_text(parameter.default)}"
        parameters.append(f"{star}{name}: {parameter.annotation}{default}")
    result = found.return_annotation
    return f"({', '.join(parameters)})" + ("" if result in ("None", None, found.empty) else f" -> {result}")


def default_text(value: object) -> str:
    return value.__name__ if inspect.isclass(value) else repr(value)


def returned(function: Any) -> str:
    return str(function.__annotations__.get("return", "Any"))


def code(text: str) -> str:
    """A code block, with one parameter per line if the text is too long for one line."""
    if len(text) > WIDTH and (match := re.fullmatch(r"(.*?)\((.*)\)( -> .*)?", text)):
        parameters = "".join(f"    {each},\n" for each in split_parameters(match[2]))
        text = f"{match[1]}(\n{parameters}){match[3] or ''}"
    return f"```python\n{text}\n```"


def split_parameters(text: str) -> list[str]:
    """Splits at the commas outside brackets."""
    found, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [each.strip() for each in found]


def markdown(docstring: str, skip: tuple[str, ...] = ()) -> str:
    """A docstring with its sections (Args, Attributes, Returns, Raises) as lists."""
    parts = []
    for block in re.split(r"\n\n", docstring):
        match = re.match(r"(Args|Attributes|Returns|Raises):\n", block)
        if match is None:
            parts.append(block if block.startswith(" ") else textwrap.fill(" ".join(block.split()), WIDTH))
        elif match[1] not in skip:
            parts.append(f"{match[1]}:\n\n{entries(match[1], textwrap.dedent(block[match.end() :]))}")
    return "\n\n".join(parts)


def entries(title: str, text: str) -> str:
    """The entries of a section as a list; further lines of an entry are indented in the source."""
    if title == "Returns":
        return textwrap.fill(" ".join(text.split()), WIDTH)
    lines = []
    for entry in re.split(r"\n(?=\S)", text.strip()):
        names, colon, meaning = " ".join(entry.split()).partition(": ")
        shown = ", ".join(f"`{name}`" for name in names.split(", ")) if colon else names
        lines.append(textwrap.fill(f"- {shown}{colon}{meaning}", WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


if __name__ == "__main__":
    (REFERENCE / "python").mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
